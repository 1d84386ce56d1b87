"""The outputs: the HTML page (cases, curves, timelines, costs and their goals), and the files that machines read."""

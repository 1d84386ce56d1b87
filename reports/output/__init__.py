"""The outputs: the HTML page with its curves and timelines, and the files that machines read."""

"""What a run is made of: its description, how it differs from the run that was saved, its mesh, the order of its schedule."""

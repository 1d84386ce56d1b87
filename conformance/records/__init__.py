"""What a run writes down and reads back: trajectories, results, evidence, disk changes, provenance."""

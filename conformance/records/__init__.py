"""What a run writes and reads back: results, trajectories, evidence, recorded disk changes, provenance."""

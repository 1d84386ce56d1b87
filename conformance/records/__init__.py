"""The files that a run writes and reads back: results, trajectories, evidence, comparisons, provenance."""

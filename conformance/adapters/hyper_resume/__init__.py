"""The adapter for hyper_resume: starts its legs, builds models and data from ``given``, reports events, pauses at faults."""

"""The training loop, its callbacks, and what a run is: where it resumes, what describes it, what it does not save."""

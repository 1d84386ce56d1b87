"""T3: each file operation of a save or load fails with an error of the system, once or from then on."""

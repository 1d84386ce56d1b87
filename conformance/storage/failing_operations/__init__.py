"""T3: each file operation of a save or load fails once, or from then on."""

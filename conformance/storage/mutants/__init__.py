"""T7: the code that keeps the promises is broken in one place at a time, and a proof must notice."""

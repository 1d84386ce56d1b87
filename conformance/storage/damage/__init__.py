"""T2: a committed checkpoint is damaged in every way, and loaded."""

"""T1: every state that a crash may leave on disk, judged by the real loader."""

"""T1: every state of the disk that a crash during a save may leave, loaded by the real loader."""

"""The ground: every change on disk, and the lock of one writer."""

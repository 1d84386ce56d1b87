"""File system calls: open, map, write, sync, rename, delete; the lock of a root."""

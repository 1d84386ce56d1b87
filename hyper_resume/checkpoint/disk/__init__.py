"""File system calls: open, write, sync, rename and delete files, map them into memory, and lock a root for one writer."""

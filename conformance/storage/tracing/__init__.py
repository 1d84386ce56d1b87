"""Traces of file operations: the recorder and its hooks, orders of several ranks, and the file trees that result."""

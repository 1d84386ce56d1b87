"""Buckets: trainer objects <-> plain state. Knows no disk."""

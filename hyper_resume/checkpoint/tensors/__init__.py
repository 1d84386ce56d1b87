"""Tensors in memory: flatten a nested state into named entries, copy and digest many tensors, share work among threads."""

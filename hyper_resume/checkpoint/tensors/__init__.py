"""Tensors in memory: flatten a state, copy and digest many tensors, share work in threads."""

"""Algorithms on tensors in memory, for saves and loads: flatten a state, copy and digest many tensors, in threads."""

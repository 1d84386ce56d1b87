"""States as named entries, and copies of many tensors at memory speed."""

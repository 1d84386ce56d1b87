"""T6: hostile checkpoint files and configurations: a fuzzer makes them, the real readers open them, a worker limits memory."""

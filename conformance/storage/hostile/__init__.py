"""T6: hostile files and configurations by the thousand, each read by the real readers."""

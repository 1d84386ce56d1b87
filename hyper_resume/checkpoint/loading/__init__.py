"""The steps of a load: verify files, compare entries, read them, write the live state."""

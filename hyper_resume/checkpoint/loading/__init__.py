"""The steps of a load: verify the files, compare the entries with the live state, read them, then write the live state."""

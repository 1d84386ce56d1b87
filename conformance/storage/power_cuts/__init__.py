"""T5: power cuts on a real file system on a loop device."""

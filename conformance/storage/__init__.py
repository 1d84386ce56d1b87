"""Is a checkpoint whole, or does it not count? Every crash state within a bound, every byte flipped, every operation failed."""

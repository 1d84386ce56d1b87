"""The storage proofs: crash states, damage, failing operations, hostile input, power cuts, and mutants of the library."""

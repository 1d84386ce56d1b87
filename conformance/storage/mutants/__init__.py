"""T7: mutation testing of the proofs: the library is changed in one place at a time, and a proof must fail."""

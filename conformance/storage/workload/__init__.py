"""The saves that the storage proofs record and judge: a small checkpoint, scenarios with the library, and stock DCP."""

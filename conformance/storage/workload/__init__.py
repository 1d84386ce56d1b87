"""What the storage proofs save and load: a small checkpoint, scenarios of saves by the library and by stock DCP."""

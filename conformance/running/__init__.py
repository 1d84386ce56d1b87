"""Runs cases: sessions, cases, legs, references; and the trainer's side of a leg: its job, its probe, its file operations."""

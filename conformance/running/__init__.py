"""Runs cases: sessions, legs, launchers and processes, and the interface to a trainer (adapter, job, probe)."""

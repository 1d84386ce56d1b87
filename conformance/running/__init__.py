"""Runs cases: sessions, legs, launchers, forked ranks and other processes, and what a trainer runs (job, probe, disk changes)."""

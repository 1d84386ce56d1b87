"""Runs cases: sessions, legs, launchers, forked ranks and other processes, and what runs inside a trainer (job, probe, disk changes)."""

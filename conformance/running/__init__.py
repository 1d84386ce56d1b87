"""Runs cases: sessions, legs, launchers, forked ranks and other processes; and the trainer's side: job, probe, disk changes."""

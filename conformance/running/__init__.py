"""Running cases: sessions, legs, launchers, processes, and what a trainer is handed (job and probe)."""

"""Processes: launchers start ranks (alone, forked from a warm server, under torchrun); ranks are found, killed, reaped."""

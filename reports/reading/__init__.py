"""Strict readers of results folders, test results and costs; frames of records; redaction of secrets and paths."""

"""Choosing among several saves: which save continues which, which one LATEST means, and which ones retention deletes."""

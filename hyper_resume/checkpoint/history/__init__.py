"""Which save continues which, which one LATEST means, and which ones retention deletes."""

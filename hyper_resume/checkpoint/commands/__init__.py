"""The commands on checkpoints: ``inspect``, ``diff``, ``verify`` and ``doctor``; they find things out and return reports."""

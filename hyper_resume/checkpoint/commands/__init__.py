"""The commands on checkpoints: inspect, diff, verify and doctor; they return reports."""

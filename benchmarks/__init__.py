"""Measures what saving, loading and skipping cost, and compares it with the limits of the hardware and with other libraries."""

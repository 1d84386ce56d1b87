"""Turns the evidence of a case into its outcome, and judges a whole run again from its records."""

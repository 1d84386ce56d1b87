"""Turns the outcomes of its checks into the outcome of a case, and judges a whole run again from its records."""

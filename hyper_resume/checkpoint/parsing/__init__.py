"""Parsers for untrusted bytes: pickle, JSON, archives, DCP metadata; they run no code."""

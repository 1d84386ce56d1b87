"""Parsers for untrusted bytes: pickle, JSON, ``torch.save`` archives, DCP metadata; they have limits and run no code."""

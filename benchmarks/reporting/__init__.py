"""Turns measured rounds into figures, records, a table and a page."""

"""Turns measured rounds of the benchmarks into figures, records, a table and a page with charts."""

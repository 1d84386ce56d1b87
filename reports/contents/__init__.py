"""The report as data, and its words in two languages."""

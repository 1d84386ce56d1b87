"""From rounds to records, figures, table and page."""

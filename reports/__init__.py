"""The acceptance report: results folders become one self-contained HTML page and files that machines read."""

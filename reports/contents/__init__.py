"""The report as data, and its words and case titles in two languages."""

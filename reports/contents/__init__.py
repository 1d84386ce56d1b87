"""The data model of the report, and the word lists and case titles in two languages."""

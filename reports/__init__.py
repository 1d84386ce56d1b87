"""The reports room: a results folder becomes one self-contained HTML file."""

"""Records read strictly: results folders, test results, costs, frames, and what must not get onto a page."""

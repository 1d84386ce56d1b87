"""From evidence to the outcome of a case, and a whole run judged again from its records."""

"""Which saves descend from which, which one LATEST means, and which are kept."""

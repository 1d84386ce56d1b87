"""How it is measured: rounds, processes, memory. Knows nothing of what is measured."""

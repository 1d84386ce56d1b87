"""Imported last in a process that only forks: its children's garbage collections leave alone what is loaded by now.

Otherwise each of them reads every object of torch and transformers, and so copies the memory that it shares.
"""

import gc

gc.collect()
gc.freeze()

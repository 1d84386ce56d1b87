"""Imported last in a process that only forks: its children's garbage collections leave alone what is loaded by now.

Otherwise each of them reads every object of torch and transformers, and so copies the memory that it shares.
"""

import gc

from hyper_resume.config import RunConfig

# Makes the validator of all blocks, a tenth of a second in each process that has none.
RunConfig()
gc.collect()
gc.freeze()

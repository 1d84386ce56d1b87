"""System tests under torchrun: scenarios, random kills (soak), kills at each file operation of a save (sweep)."""

"""T2: damaged checkpoints: flipped bits, cut, missing and swapped files, edited manifests; each is loaded."""

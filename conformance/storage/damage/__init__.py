"""T2: checkpoints are made and damaged (flipped bits, cut, missing and swapped files, edited manifests), loaded and judged."""

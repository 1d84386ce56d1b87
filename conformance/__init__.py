"""The conformance matrix: cases as data, the runner that carries them out on a trainer, and the checks that judge them."""

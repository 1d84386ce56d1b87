"""The benchmarks: one module each, with its ``BENCHMARK``: what is measured, and the figures and goals that follow."""

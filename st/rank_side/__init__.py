"""Tests that run inside each MPI rank: ``mpiexec -n 4 python -m pytest --with-mpi st/rank_side``.

The folder is not named ``mpi``: pytest takes folder names for keywords, and pytest-mpi would then skip everything below it
without a word when its flag is missing.
"""

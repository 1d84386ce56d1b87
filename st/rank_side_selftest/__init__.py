"""Tests of the rank-side harness: it must fail where it has to; ``tox -e mpi`` runs them. Needs mpiexec."""

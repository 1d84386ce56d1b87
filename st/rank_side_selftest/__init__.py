"""The harness of the rank-side tests, shown to fail where it must; ``tox -e mpi`` runs it. Needs mpiexec."""

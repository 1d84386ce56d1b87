"""The data model of cases: ``given``, ``script``, faults on disk, platforms, and how a command line selects cases."""

"""The state buckets: collect, compare and write back the state of live models, optimizers, loaders and streams; no files.

``model`` · ``optimizer`` · ``scheduler`` · ``dataloader`` · ``rng`` random streams · ``stateful`` any other object with a
``state_dict`` · ``names`` parameter names without wrapper prefixes · ``certificate`` the record of what a restore did. In each
bucket ``collect_*`` reads, ``check_*`` lists what would not be restored exactly, and ``apply_*`` writes.
"""

"""A save on its way: each rank's contribution, its shard file, the commit, the root that a run writes to."""

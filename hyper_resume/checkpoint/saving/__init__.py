"""The steps of a save: lock the root, copy and digest the state, plan, write each rank's shard file, commit, report."""

"""The steps of a save: lock the root, copy and digest the state, plan, write shards, publish."""

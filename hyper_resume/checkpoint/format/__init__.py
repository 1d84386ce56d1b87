"""What the bytes of a step directory mean: names, manifest, index, shards, training state, digests."""

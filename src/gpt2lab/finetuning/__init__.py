"""The second recipe: conversations instead of shards, adapters instead of weights."""

"""Fine-tuning: conversations instead of shards, optionally adapters instead of all weights."""

"""A run's checkpoints: their files, how they are committed, found and loaded."""

"""A run's checkpoints: their files, how they are committed, found, listed and loaded, and other programs' files."""

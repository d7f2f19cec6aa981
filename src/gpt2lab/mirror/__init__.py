"""Checkpoints to and from object storage."""

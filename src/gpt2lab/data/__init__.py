"""Tokens: from documents to shards, from shards to batches."""

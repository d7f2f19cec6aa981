"""Weights and optimizer state spread over processes: ZeRO stage 1, fully sharded, and what both have in common."""

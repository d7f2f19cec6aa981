"""Measurements side by side, one module per verb of scripts/benchmark.py."""

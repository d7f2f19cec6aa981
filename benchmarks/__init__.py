"""Measurements beside other programs, one module per verb of scripts/benchmark.py; not part of the package."""

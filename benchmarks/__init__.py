"""Measurements beside other programs, one module per verb of `gpt2lab benchmark`; not part of the package."""

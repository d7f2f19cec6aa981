"""Weights in the layout of other programs: transformers and llama.cpp."""

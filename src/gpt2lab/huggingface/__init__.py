"""Weights in and out of the layout of Hugging Face."""

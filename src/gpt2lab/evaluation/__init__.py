"""Evaluation of a model: validation loss, HellaSwag, samples, and the files of results."""

"""What a model is worth: validation loss, HellaSwag, samples, and the files that say so."""

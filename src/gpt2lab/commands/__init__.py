"""One module per command: the function that `gpt2lab VERB` calls."""

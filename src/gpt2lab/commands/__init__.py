"""One module per command: the function that scripts/*.py call."""

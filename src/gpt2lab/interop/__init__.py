"""Files of other programs: transformers, GGUF, lm-eval, nanoGPT, token files."""

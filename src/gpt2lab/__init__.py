"""gpt2lab: train GPT-2 from scratch; predict the run, keep every step, prove that nothing was lost."""

__version__ = "0.1.0"

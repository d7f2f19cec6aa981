"""The training loop and everything it needs: start, step, save, evaluate, stop, recover."""

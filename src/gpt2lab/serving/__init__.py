"""One model over HTTP."""

"""A run's folder: its lock, log, history, console and status."""

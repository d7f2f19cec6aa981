"""A run's folder, and how a person looks at it: status, plots, tables."""

"""What a run looks like: curves, charts, the report's page."""

"""A run before it starts: time, memory, cost and loss, each with an interval."""

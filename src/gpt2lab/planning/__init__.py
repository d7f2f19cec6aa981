"""What a run will take: time, memory, cost and loss, foretold, watched and scored. No torch but to measure."""

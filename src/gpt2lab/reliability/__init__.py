"""What can go wrong in a run, how it is noticed, and how the run ends or goes on."""

"""What a run is: every setting with its type, default, help, bounds and resume policy; presets; the command line."""

"""Every setting with its type, default, help, bounds and resume policy; presets; the request of a run."""

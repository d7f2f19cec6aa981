"""What torch.compile makes of the training step for a GPU, counted without one."""

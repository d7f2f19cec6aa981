"""Training on many ranks: process group, DDP, ZeRO-1, FSDP, exact reduction, compilation."""

"""Many processes as one: process group, DDP, ZeRO-1, FSDP, exact reduction, compilation."""

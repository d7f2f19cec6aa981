"""The GPT-2 network: blocks, attention, loss, LoRA, activation checkpointing, and its size in closed form."""

"""Hugging Face's GPT2LMHeadModel in the plain training loop of its examples; run as a program of its own.

hf_loop.py TOKENS.bin DEVICE N_LAYER N_HEAD N_EMBD VOCAB_SIZE CONTEXT_LENGTH MINI_BATCH_SIZE ACCUMULATION
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main(tokens_path: str, device: str, *shape: str) -> None:
    """Train until killed, a line per step."""
    L, H, C, V, T, B, accumulation = map(int, shape)
    torch.manual_seed(1337)
    config = GPT2Config(
        **{"n_layer": L, "n_head": H, "n_embd": C, "vocab_size": V, "n_positions": T},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False},
    )
    model = GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    tokens = torch.from_numpy(np.fromfile(tokens_path, dtype=np.uint16).astype(np.int64))
    position = 0
    while True:
        began = time.perf_counter()
        total = 0.0
        for _ in range(accumulation):
            x = tokens[position : position + B * T].view(B, T).to(device)
            position = (position + B * T) % (len(tokens) - B * T)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(input_ids=x, labels=x).loss / accumulation
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"loss {total:.4f} ms {1000 * (time.perf_counter() - began):.3f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

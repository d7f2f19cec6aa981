"""Load exported folders as a stranger does: transformers alone, offline, without gpt2lab. Run with python -I.

Prints what it found as JSON: {folder: {logits, whole, cached, padded, text_ids, text}}.
"""

import json
import socket
import sys

# Importing gpt2lab fails now, also where it is installed beside transformers.
sys.modules["gpt2lab"] = None  # type: ignore[assignment]


def no_network(*args: object) -> None:
    raise OSError("a connection was tried")


socket.socket.connect = no_network

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

logging.disable_progress_bar()
logging.set_verbosity_error()
found = {}
for folder, asked in json.loads(sys.argv[1]).items():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = torch.tensor(asked["ids"])
    prompt, new = ids[:, : asked["prompt"]], asked["new"]
    greedy = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    padded = torch.cat([torch.zeros(len(prompt), 3, dtype=torch.int64), prompt], dim=1)
    mask = (torch.arange(padded.size(1)) >= 3).long().expand_as(padded)
    longer = torch.cat([prompt.new_ones(len(prompt), 3), prompt], dim=1)
    batch, batch_mask = torch.cat([padded, longer]), torch.cat([mask, torch.ones_like(mask)])
    with torch.no_grad():
        found[folder] = {
            "model": type(model).__name__,
            "logits": model(ids).logits.tolist(),
            "cached": model.generate(prompt, **greedy)[:, -new:].tolist(),
            "whole": model.generate(prompt, use_cache=False, **greedy)[:, -new:].tolist(),
            "padded": model.generate(batch, attention_mask=batch_mask, **greedy)[
                : len(prompt), -new:
            ].tolist(),
            "text_ids": tokenizer(asked["text"], add_special_tokens=False)["input_ids"],
            "text": tokenizer.decode(tokenizer(asked["text"])["input_ids"]),
        }
print(json.dumps(found))

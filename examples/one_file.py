"""Train GPT-2 from scratch: all that training needs, in one file to be read from top to bottom.

python scripts/prepare_data.py python-stdlib --tokenizer bytes --out data/bytes
python examples/one_file.py --data_dir data/bytes --n_layer 2 --n_head 2 --n_embd 64 \
    --context_length 128 --total_batch_size 4096 --mini_batch_size 8 --max_steps 200 --max_lr 3e-3

The trainer in src/gpt2lab computes the same losses, bit for bit, when it runs as one process with
--device cpu --dtype fp32 --compile off; tests/integration/test_one_file.py compares them. What it
adds is speed, many GPUs, checkpoints that resume exactly, and checks.

Shapes: B sequences of T tokens, C channels (n_embd), H heads, D = C / H, V rows of the vocabulary.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

FLAGS: dict[str, tuple[Any, Any, str]] = {  # names and defaults are the trainer's
    "data_dir": (Path, "data/fineweb_edu", "folder with shards.json"),
    "n_layer": (int, 12, "blocks"),
    "n_head": (int, 12, "attention heads in a block, H"),
    "n_embd": (int, 768, "channels of the residual stream, C"),
    "context_length": (int, 1024, "tokens that the model sees at once, T"),
    "vocab_size": (int, None, "rows of the embedding, V; default: enough for the tokenizer"),
    "total_batch_size": (int, 524_288, "tokens in a step"),
    "mini_batch_size": (int, 16, "sequences in a forward pass, B"),
    "max_steps": (int, None, "steps; default: one pass over the data"),
    "max_lr": (float, 6e-4, "peak learning rate"),
    "seed": (int, 1337, "of the initial weights and of the order of the data"),
    "json": (Path, "/dev/null", "file to write, one JSON object per step"),
}
DECAY, BETAS, EPS, GRAD_CLIP = 0.1, (0.9, 0.95), 1e-8, 1.0
EVAL_FREQ, VAL_TOKENS, SAMPLE_TOKENS = 250, 10_485_760, 200
GPT2 = {"size": 50257, "end_of_text": 50256}  # ids of its tokenizer, which shards.json leaves out


def stop(message: object, code: int = 2) -> NoReturn:
    """End the program with one line that says what is wrong."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


# ---- 1. Data -------------------------------------------------------------------------------------
# prepare_data.py has turned text into token ids. A shard is a .npy file with one long array of ids;
# shards.json lists the shards of both splits, train and val, and describes the tokenizer.
# The model learns from windows of T + 1 ids: it sees the first T and predicts the last T, each from
# those before it. Window k of a shard begins at token k * T, so each token is predicted once in an
# epoch, a pass over the data. The windows of all epochs are numbered 0, 1, 2, ...: step 1 trains
# the first S of them, step 2 the next S. Seed and number alone decide which, on every machine.
class Split:
    """The windows in the shards of a split."""

    def __init__(self, folder: Path, split: str, T: int) -> None:
        manifest = json.loads((folder / "shards.json").read_text())
        names = [file["name"] for file in manifest["files"] if file["split"] == split]
        self.max_id = max(file["max_id"] for file in manifest["files"])
        known = GPT2 if manifest["tokenizer"]["name"] == "gpt2" else {}
        self.tokenizer, self.T = {**known, **manifest["tokenizer"]}, T
        self.shards = [np.load(folder / n, "r") for n in names if n.endswith(".npy")]  # memory maps
        self.windows = np.array([(len(ids) - 1) // T for ids in self.shards])
        if not self.shards or self.windows.min() < 1:
            raise ValueError(f"{split} needs .npy shards, of more than context_length {T} tokens")
        self.size = int(self.windows.sum())

    def locate(self, number: int, shuffle: str = "none", seed: int = 0) -> tuple[int, int]:
        """Return the shard of a window, and the place of its first token there."""
        epoch, place = divmod(number, self.size)
        order = np.arange(len(self.shards))
        if shuffle == "windows":
            place = permute(place, self.size, [seed, epoch])
        elif shuffle == "shards" and epoch > 0:
            order = np.random.RandomState([seed, epoch]).permutation(len(order))
        starts = np.cumsum([0, *self.windows[order]])
        slot = int(np.searchsorted(starts, place, side="right")) - 1
        return int(order[slot]), (place - int(starts[slot])) * self.T

    def read(self, places: list[tuple[int, int]]) -> Tensor:
        """Return the windows at some places, (len(places), T + 1)."""
        windows = [self.shards[shard][begin : begin + self.T + 1] for shard, begin in places]
        return torch.from_numpy(np.stack(windows).astype(np.int64))


def permute(place: int, size: int, seeds: list[int]) -> int:
    """Return where a random permutation of 0 ... size - 1 sends `place`, without storing it.

    A Feistel network (Black and Rogaway 2002) mixes one half of the bits into the other, 8 times.
    Each time can be undone, so no two places collide. A result beyond the range goes through again.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = np.random.RandomState(seeds).randint(0, 2**32, size=8, dtype=np.uint64).tolist()
    while True:
        left, right = place >> half, place % 2**half
        for key in keys:  # mixing by SplitMix64 (Steele et al. 2014)
            word = (right + key) * 0x9E3779B97F4A7C15 % 2**64
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (word ^ word >> 31) % 2**half
        place = left << half | right
        if place < size:
            return place


# ---- 2. Model ------------------------------------------------------------------------------------
# GPT-2 (Radford et al. 2019). Each position has a vector of C numbers, the residual stream. A block
# reads it twice, by attention and by an MLP, and adds what it computed. At the end, the vector of
# position t is compared with that of every token: the more alike, the more likely it comes next.
class Block(nn.Module):
    """Attention, then MLP; each reads a normalized copy of the stream."""

    def __init__(self, C: int, n_head: int) -> None:
        super().__init__()
        self.n_head, self.ln_1 = n_head, nn.LayerNorm(C)
        self.c_attn = nn.Linear(C, 3 * C)  # queries, keys and values in one product
        self.attn_proj, self.ln_2 = nn.Linear(C, C), nn.LayerNorm(C)
        self.c_fc, self.mlp_proj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        """Map the stream (B, T, C) to the stream after this block."""
        B, T, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=2)  # (B, T, C), then (B, H, T, D)
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in (q, k, v))
        # softmax(q k^T / sqrt(D)) v: a mean of the values so far, weighted by query and keys
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Token ids in, scores of the next id out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        V, C, self.T = args.vocab_size, args.n_embd, args.context_length
        self.wte = nn.Embedding(V, C)  # a vector for each token; also the output layer's weight
        self.wpe = nn.Embedding(self.T, C)  # a vector for each position
        self.blocks = nn.ModuleList(Block(C, args.n_head) for _ in range(args.n_layer))
        self.ln_f = nn.LayerNorm(C)
        # Rows without a token only make V a round number: their scores are -inf, probability 0.
        padding = torch.where(torch.arange(V) < args.num_ids, 0.0, -math.inf)
        self.padding = padding if args.num_ids < V else None
        generator = torch.Generator().manual_seed(args.seed)
        for name, weight in self.named_parameters():
            std = 0.01 if name == "wpe.weight" else 0.02
            if name.endswith("_proj.weight"):  # 2 n_layer results are added to the stream
                std /= math.sqrt(2 * args.n_layer)
            if weight.dim() == 2:
                nn.init.normal_(weight, 0.0, std, generator)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (B, T) to scores of each next id, (B, T, V), whose softmax is its probability."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight, self.padding)


# ---- 3. Training ---------------------------------------------------------------------------------
def train_step(model: GPT, optimizer: Any, ids: Tensor, B: int, lr: float) -> tuple[float, float]:
    """Learn from windows (S, T + 1); return mean loss and norm of the gradient before the update.

    The loss is -log(probability of the target). All S windows at once could fill the memory. B at
    a time give the same gradient: it is a sum over windows, and backward() adds to the sum so far.
    """
    num_targets, total = ids[:, 1:].numel(), torch.zeros(())
    for micro in torch.split(ids, B):
        logits, targets = model(micro[:, :-1]).flatten(0, 1), micro[:, 1:].flatten()
        loss = F.cross_entropy(logits, targets, reduction="sum")
        torch.autograd.backward(loss * (1 / num_targets))
        total += loss.detach()
    # Squares are added in fp32 within a row, in fp64 over rows: fp32 alone would lose digits.
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    rows = [torch.linalg.vector_norm(g, dim=-1) if g.dim() == 2 else g for g in gradients]
    norm = torch.cat(rows).double().square().sum().sqrt()
    for g in gradients:  # clip them: a single unusual batch must not move the weights far
        g.mul_(torch.clamp(GRAD_CLIP / (norm + 1e-6), max=1.0).float())
    loss, norm = total / num_targets, norm.float()
    if not (loss.isfinite() and norm.isfinite()):
        stop(f"loss {loss:.4g}, gradient norm {norm:.4g}; try a lower --max_lr", code=76)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    model.zero_grad()
    return loss.item(), norm.item()


def lr_at(step: int, max_steps: int, max_lr: float) -> float:
    """Return the learning rate of step 1, 2, ...: a line up to max_lr, then half a cosine down."""
    warmup, min_lr = min(715, max_steps // 10), float(f"{max_lr / 10:.12g}")
    if step < warmup:
        return max_lr * step / warmup
    progress = 0.5 * (1.0 - math.cos(math.pi * ((step - warmup) / (max_steps - warmup))))
    return max_lr * (1.0 - progress) + min_lr * progress


# ---- 4. What the model has learned ---------------------------------------------------------------
@torch.inference_mode()
def validation_loss(model: GPT, val: Split, B: int) -> float:
    """Return the mean loss on text that the model never learns, over evenly spread windows."""
    N, losses = min(val.size, max(1, VAL_TOKENS // val.T)), []
    places = [val.locate(i * val.size // N) for i in range(N)]
    for first in range(0, N, B):
        ids = val.read(places[first : first + B])
        logits, targets = model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        losses.append(F.cross_entropy(logits, targets, reduction="none").double())
    # Add by document, then over documents, as the trainer: in another order the last bit may differ.
    ends = np.flatnonzero(np.concatenate(val.shards) == val.tokenizer.get("end_of_text"))
    starts = np.cumsum([0, *map(len, val.shards)])  # of the shards in this long array
    firsts = np.array([[starts[shard] + begin + 1] for shard, begin in places])  # targets, (N, 1)
    document = np.searchsorted(ends, firsts + np.arange(val.T))  # of each target, (N, T)
    is_first = np.diff(document, axis=1, prepend=-1) != 0  # of a document in a window
    nats = np.add.reduceat(torch.cat(losses).numpy(), np.flatnonzero(is_first))
    of = np.unique(document[is_first], return_inverse=True)[1]
    by_unit = np.bincount(of, weights=nats) if of.max() > 0 else nats  # one document: by window
    return float(by_unit.sum() / (N * val.T))


@torch.inference_mode()
def sample(model: GPT, ids: list[int], seed: int) -> list[int]:
    """Continue `ids`: draw each next id with the probability that the model gives it."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(SAMPLE_TOKENS):
        scores = model(torch.tensor([ids[-model.T :]]))[0, -1]  # (V,)
        ids = [*ids, int(torch.multinomial(scores.softmax(0), 1, generator=generator))]
    return ids


# ---- 5. The run ----------------------------------------------------------------------------------
def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the flags, and stop if they cannot work."""
    parser = argparse.ArgumentParser(description="Train GPT-2 from scratch.", allow_abbrev=False)
    parser.error = stop  # type: ignore[method-assign]
    for name, (kind, default, meaning) in FLAGS.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=meaning)
    kinds = ("shards", "windows", "none")
    parser.add_argument("--shuffle", choices=kinds, default="shards", help="what an epoch permutes")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if isinstance(value, int) and value < (name != "seed"):
            stop(f"{name} {value} is too small")
    if args.n_embd % args.n_head:
        stop(f"n_embd {args.n_embd} is not a multiple of n_head {args.n_head}")
    if args.total_batch_size % (unit := args.mini_batch_size * args.context_length):
        stop(f"total_batch_size must be a multiple of mini_batch_size x context_length = {unit}")
    if not (0 < args.max_lr < math.inf and args.seed < 2**32):
        stop("max_lr must be above 0 and finite, seed below 2**32")
    return args


def main(argv: list[str] | None = None) -> None:
    """Train, and print what happens."""
    args = parse(argv)
    B, S = args.mini_batch_size, args.total_batch_size // args.context_length
    try:
        train, val = (Split(args.data_dir, name, args.context_length) for name in ("train", "val"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        stop(f"{args.data_dir}: {error}; prepare data with scripts/prepare_data.py")
    args.num_ids = train.tokenizer.get("size") or args.vocab_size or 50304
    args.vocab_size = args.vocab_size or math.ceil(args.num_ids / 128) * 128
    if train.max_id >= args.vocab_size:
        stop(f"vocab_size {args.vocab_size} is too small for token id {train.max_id}")
    if (last := args.max_steps or train.size // S) == 0:
        stop(f"the data hold less than one step of total_batch_size {args.total_batch_size} tokens")
    model = GPT(args)
    # Weight decay shrinks the matrices, but not the vectors: biases and LayerNorms.
    matrices, vectors = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    groups: Any = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
    with open(args.json, "w", buffering=1) as log:
        for step in range(last + 1):
            if step > 0:
                numbers, lr = range((step - 1) * S, step * S), lr_at(step, last, args.max_lr)
                ids = train.read([train.locate(n, args.shuffle, args.seed) for n in numbers])
                loss, norm = train_step(model, optimizer, ids, B, lr)
                print(f"step {step}/{last} | loss {loss:.4f} | lr {lr:.1e} | norm {norm:.2f}")
                print(json.dumps(dict(step=step, loss=loss, grad_norm=norm, lr=lr)), file=log)
            if step % EVAL_FREQ == 0 or step == last:
                loss = validation_loss(model, val, B)
                print(f"step {step}/{last} | val loss {loss:.4f}")
    if not math.isfinite(loss):
        stop("the validation loss is not finite; try a lower --max_lr", code=76)
    drawn = sample(model, val.shards[0][:16].tolist(), args.seed)
    text = bytes(id for id in drawn if id < 256).decode(errors="replace")
    print("sample:", repr(text) if val.tokenizer["name"] == "bytes" else f"token ids {drawn}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        stop(error)

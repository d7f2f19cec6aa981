"""Run modded-nanogpt's train_gpt_simple.py as it stands on a CPU, and the preset `speedrun` beside it, step by step.

git clone https://github.com/KellerJordan/modded-nanogpt CHECKOUT
PYTHONPATH=src python -m benchmarks.speedrun_recording CHECKOUT tests/golden/speedrun.json

The file's statements are executed one after the other. What it asks of a GPU, of NCCL and of torch.compile is replaced,
in fp32 also its roundings to bf16; after the statements that define its sizes these are small ones, and after the one
that draws its weights these are ours. It reads the same token files as our run.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from gpt2lab.commands import entry
from gpt2lab.commands.command_line import parse
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument
from gpt2lab.interop.import_shards import import_folder
from gpt2lab.model.gpt import build_model
from gpt2lab.runs.history import read_log
from gpt2lab.runs.target import find_target
from gpt2lab.runs.weights import load_weights
from gpt2lab.training.pretrain import pretrain
from gpt2lab.training.recipe import PRETRAINING
from gpt2lab.training.resolve import resolve

PROGRAM = "records/track_3_optimization/train_gpt_simple.py"
SEED = 1


@dataclass(frozen=True)
class Flags:
    """Where the program lies, and where its recording goes."""

    checkout: Path = argument("clone of KellerJordan/modded-nanogpt")
    out: Path = argument("file of the recording, JSON")


@dataclass(frozen=True)
class Shape:
    """A run's sizes: of the model, of a step in tokens, of a forward pass in sequences."""

    n_layer: int
    n_embd: int
    n_head: int
    context: int
    vocab: int
    batch: int
    micro: int
    steps: int = 60
    val_batches: int = 4


@dataclass
class Losses:
    """What a run computed: a loss of each step, validation losses at both ends, and the weights at the end."""

    steps: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def norms(self) -> dict[str, float]:
        """Return the L2 norm of each weight."""
        return {
            name: float(torch.linalg.vector_norm(w.double())) for name, w in self.weights.items()
        }


SHAPES = {
    "small": Shape(2, 128, 2, context=64, vocab=512, batch=1024, micro=8),
    "wide": Shape(3, 256, 2, context=128, vocab=512, batch=2048, micro=8),
}


def write_tokens(folder: Path, shape: Shape) -> None:
    """Write two training files and a validation file of llm.c's format, each of whole batches.

    The program leaves out the rest of a file that fills no batch, where ours trains on it.
    """
    folder.mkdir(parents=True)
    first = 2 * shape.steps // 3  # the run passes from one file into the next
    sizes = {"train_000001": first, "train_000002": shape.steps, "val_000000": shape.val_batches}
    for index, (name, batches) in enumerate(sizes.items()):
        count, random = batches * shape.batch + 2, np.random.RandomState(index)
        jumps = np.where(random.rand(count) < 0.7, 3, random.randint(0, shape.vocab, count))
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, count
        tokens = (np.cumsum(jumps) % shape.vocab).astype(np.uint16)
        (folder / f"fineweb_{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())


def flags_of(shape: Shape, folder: Path, dtype: str) -> list[str]:
    """Return the command line of our run: the preset, and the sizes."""
    return [
        *("--model=speedrun", f"--n_layer={shape.n_layer}", f"--n_embd={shape.n_embd}"),
        *(f"--n_head={shape.n_head}", f"--context_length={shape.context}", f"--seed={SEED}"),
        *(f"--vocab_size={shape.vocab}", f"--total_batch_size={shape.batch}"),
        *(f"--mini_batch_size={shape.micro}", f"--max_steps={shape.steps}"),
        f"--adam_eps={1e-10 / shape.batch}",  # of a mean over tokens, where the program has a sum
        *(f"--data_dir={folder}", f"--checkpoint_dir={folder.parent / 'runs'}", "--eval_freq=0"),
        *(f"--run_name={dtype}", f"--dtype={dtype}", f"--residual_dtype={dtype}"),
        *("--device=cpu", "--compile=off", "--sample_freq=0", "--log_freq=1000"),
    ]


def train_ours(shape: Shape, folder: Path, dtype: str, *more: str) -> Losses:
    """Train the preset on the tokens of a folder, with more flags."""
    if not (folder / "shards.json").exists():
        import_folder(folder)
    pretrain(parse([*flags_of(shape, folder, dtype), *more]).request, recipe=PRETRAINING)
    run = folder.parent / "runs" / dtype
    log = read_log(run)
    return Losses(
        log.column("loss").tolist(),
        [event["val_loss"] for event in log.of_kind("eval")],
        as_theirs(load_weights(find_target(dtype, run.parent)).state_dict(), shape),
    )


def as_theirs(weights: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Return our weights by the program's names.

    It rotates queries and keys the other way round: its first half of a head's channels is our second.
    """
    names = {"wte": "embed", "ln_e": "norm1", "ln_f": "norm2", "lm_head": "proj"}
    names |= {"ln_1": "norm1", "ln_2": "norm2", "c_fc": "fc", "c_proj": "proj"}
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        *path, kind = name.split(".")
        if path[-1] == "c_attn":
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                heads = part.view(shape.n_head, 2, -1, *part.shape[1:])
                swapped = part if letter == "v" else heads.flip(1).flatten(0, 2)
                found[".".join([*path[:-1], letter, kind])] = swapped
        else:
            last = names[path[-1]]
            kind = "gains" if last.startswith("norm") else kind
            found[".".join([*path[:-1], last, kind])] = tensor
    return found


def train_theirs(
    program: Path, shape: Shape, work: Path, weights: dict[str, Tensor], dtype: str
) -> Losses:
    """Execute the program on the tokens of `work`, a folder as its own, from given weights."""
    found = Losses()
    sums: dict[bool, list[float]] = {True: [], False: []}  # while training, and not

    def keep(model: nn.Module, inputs: Any, loss: Tensor) -> None:
        sums[model.training].append(float(loss))

    small = {
        **{"val_tokens": shape.val_batches * shape.batch, "batch_size": shape.batch},
        **{"mbs": shape.micro, "train_steps": shape.steps},
    }
    sizes = {**{"vocab_size": shape.vocab, "num_layers": shape.n_layer, "model_dim": shape.n_embd}}
    scope: dict[str, Any] = {"__name__": "__main__"}

    def small_model(published: Any, **_: int) -> nn.Module:
        model: nn.Module = published(**sizes)
        return model

    def execute(statements: list[ast.stmt]) -> None:
        for statement in statements:
            source = ast.unparse(statement)
            if source.startswith("for _ in range(num_trials)"):
                assert isinstance(statement, ast.For)
                execute(statement.body)  # once
                continue
            exec(compile(ast.Module([statement], []), str(program), "exec"), scope)
            if isinstance(statement, ast.Assign) and (name := source.split(" = ")[0]) in small:
                scope[name] = small[name]
            elif source.startswith("class CausalSelfAttention"):
                scope["CausalSelfAttention"].__init__.__defaults__ = (shape.n_embd // shape.n_head,)
            elif source.startswith("def distributed_data_generator"):
                scope["distributed_data_generator"].__defaults__ = (shape.context,)
            elif source.startswith("class GPT"):
                scope["GPT"] = functools.partial(small_model, scope["GPT"])
            elif source.startswith("model = GPT"):
                scope["model"].register_forward_hook(keep)
            elif source.startswith("for name, p in model.named_parameters"):
                own = dict(scope["model"].named_parameters())
                assert set(own) == set(weights)
                for name, parameter in own.items():
                    parameter.data.copy_(weights[name])

    with on_the_cpu(dtype), contextlib.chdir(work), mock.patch.object(sys, "argv", [str(program)]):
        execute(ast.parse(program.read_text()).body)
    each = shape.batch // shape.context // shape.micro
    parts = np.array(sums[True]).reshape(-1, each)
    found.steps = (parts.sum(axis=1) / shape.batch).tolist()
    validation = np.array(sums[False]).reshape(-1, each * shape.val_batches)
    found.validation = (validation.sum(axis=1) / small["val_tokens"]).tolist()
    found.weights = {n: p.detach().float() for n, p in scope["model"].named_parameters()}
    return found


@contextlib.contextmanager
def on_the_cpu(dtype: str) -> Iterator[None]:
    """Let the program find one process, no GPU and no compiler; with fp32 it rounds nothing to bf16."""
    move, empty = torch.Tensor.to, torch.empty

    def nothing(*args: Any, **how: Any) -> None:
        return None

    def itself(value: Any, *args: Any, **how: Any) -> Any:
        return value

    def moved(tensor: Tensor, *args: Any, device: Any = None, **how: Any) -> Tensor:
        return move(tensor, *args, **how)

    def unpinned(*args: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        return empty(*args, **how)

    of_dist = ("init_process_group", "barrier", "broadcast", "all_reduce", "all_gather")
    patches = [mock.patch.object(torch.distributed, name, nothing) for name in of_dist]
    for owner, name, value in (
        (torch.distributed, "destroy_process_group", nothing),
        (torch.distributed, "get_rank", lambda: 0),
        (torch.distributed, "get_world_size", lambda: 1),
        (torch.cuda, "set_device", nothing),
        (torch.cuda, "get_device_name", lambda device: "no GPU"),
        (torch, "compile", itself),
        (torch, "empty", unpinned),
        (torch.Tensor, "to", moved),
        (nn.Module, "cuda", itself),
        (nn.Module, "compile", nothing),
        *(
            ((torch.Tensor, "bfloat16", torch.Tensor.float), (nn.Module, "bfloat16", itself))
            if dtype == "fp32"
            else ()
        ),
    ):
        patches.append(mock.patch.object(owner, name, value))
    with contextlib.ExitStack() as entered, mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        for patch in patches:
            entered.enter_context(patch)
        yield


def record(program: Path, shape: Shape, dtype: str) -> dict[str, Any]:
    """Run both, and return what the program computed, with the largest differences of ours."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        data = work / "data" / "fineweb10B"
        write_tokens(data, shape)
        import_folder(data)
        start = resolve(parse(flags_of(shape, data, dtype)).request, world_size=1, set_aside=False)
        config, cpu = start.config, torch.device("cpu")
        first = build_model(config.model, seed=SEED, device=cpu, weight_init="fan_in")
        initial = as_theirs(first.state_dict(), shape)
        theirs = train_theirs(program, shape, work, initial, dtype)
        ours = train_ours(shape, data, dtype)
    pairs = [*zip(ours.steps, theirs.steps, strict=True)]
    apart = {
        name: float((ours.weights[name] - w).abs().max() / w.abs().max())
        for name, w in theirs.weights.items()
        if w.abs().max() > 0
    }
    return {
        "losses": [round(loss, 7) for loss in theirs.steps],
        "val_losses": [round(loss, 7) for loss in theirs.validation],
        "norms": {name: float(f"{norm:.8g}") for name, norm in theirs.norms().items()},
        "ours": [round(loss, 7) for loss in ours.steps],
        "largest_difference": {
            "loss": max(abs(a / b - 1) for a, b in pairs),
            "val_loss": max(
                abs(a / b - 1) for a, b in zip(ours.validation, theirs.validation, strict=True)
            ),
            "weight": max(apart.values()),
        },
    }


def main(argv: list[str]) -> int:
    """Record every shape in both precisions."""
    flags = parse_flags(Flags, argv)
    program = (flags.checkout / PROGRAM).resolve()
    git = ["git", "-C", str(flags.checkout), "rev-parse", "HEAD"]
    found: dict[str, Any] = {
        "program": f"https://github.com/KellerJordan/modded-nanogpt {PROGRAM}",
        "commit": subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip(),
        "sha256": hashlib.sha256(program.read_bytes()).hexdigest(),
        "command": "python -m benchmarks.speedrun_recording CHECKOUT OUT.json",
        "torch": torch.__version__,
        "runs": {},
    }
    for name, shape in SHAPES.items():
        runs = {dtype: record(program, shape, dtype) for dtype in ("fp32", "bf16")}
        found["runs"][name] = {"shape": dataclasses.asdict(shape), **runs}
        for dtype, run in runs.items():
            print(name, dtype, run["largest_difference"], file=sys.stderr)
    flags.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main))

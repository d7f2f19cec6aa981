"""What people and other programs rely on, held still while the package is rearranged.

Flags, JSON keys, files of a run, exit codes and losses, each compared with `tests/golden/contracts.json`. Wordings,
times and whatever a machine adds are left out. Nothing of gpt2lab is imported: programs are called by their names, so
that this file reads the same before and after every move inside the package, and those that make the runs are started
as users start them. A change of a contract on purpose is recorded with

    UPDATE_GOLDEN=1 pytest -m slow tests/integration/test_contracts.py

and shows in the commit as a change of that file. Without transformers, export_hf.py --json is left out.
"""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import TO_ITS_END, Done, call, worked
from record_runs import differences

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests" / "golden" / "contracts.json"
ITEMS = REPOSITORY / "tests" / "golden" / "hellaswag_items.jsonl"
pytestmark = pytest.mark.slow  # some 100 calls of programs
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"
RELATIVE = 1e-5  # golden losses: processors and torch versions differ in the last bits of a sum

# Those that are no file.
VERBS = "data doctor status runs report plot chat serve compare ablate ladder replay why-spike bisect benchmark"
PROGRAMS = (
    "src/train.py",
    "src/finetune.py",
    *sorted(
        f"scripts/{path.name}"
        for path in (REPOSITORY / "scripts").glob("*.py")
        if not path.name.startswith("_")
    ),
    *(f"gpt2lab {verb}" for verb in VERBS.split()),
)
CPU = ["--device=cpu", "--dtype=fp32", "--compile=off", "--mini_batch_size=2", "--warmup_steps=2"]
SMALL = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--context_length=64"]
BASE = [
    *(*SMALL, *CPU, "--total_batch_size=256", "--max_steps=8", "--val_tokens=1280"),
    *("--eval_freq=4", "--sample_freq=8", "--checkpoint_freq=3", "--use_tensorboard"),
    *("--data_dir=data", "--checkpoint_dir=runs", "--run_name=base", "--hellaswag_freq=8"),
    *("--hellaswag_path=items.jsonl", "--hellaswag_limit=3"),
]
MODERN = [
    *("--model=modern-nano", *SMALL, *CPU, "--total_batch_size=256", "--max_steps=4"),
    *("--optimizer=muon", "--max_lr=3e-3"),  # the preset's may be tuned again
    *("--eval_freq=2", "--val_tokens=1280", "--sample_freq=0", "--seed=7"),
    *("--data_dir=data", "--checkpoint_dir=runs", "--run_name=modern"),
]
TUNED = [
    *("--instructions=demo", "--init_from=runs/base", "--lora_r=4", *CPU),
    *("--total_batch_size=256", "--max_steps=4", "--eval_freq=2", "--sample_freq=0"),
    *("--checkpoint_dir=runs", "--run_name=tuned"),
]
TRAIN, FINETUNE, ESTIMATE = PROGRAMS[0], PROGRAMS[1], "scripts/estimate_time.py"
OWN = [flag for flag in BASE if "hellaswag" not in flag]
FRESH = [flag for flag in OWN if "run_name" not in flag] + ["--run_name=new"]
NOBODY = ["--checkpoint_dir=nowhere"]
PLAN = [TRAIN, "--dry_run", *FRESH]  # refuses what a start refuses, and does not load torch for it
TUNE = [FINETUNE, "--dry_run", *TUNED, "--run_name=new"]
RENAMED = "num_layers embd_size num_heads logdir tensorboard_dir steps_per_epoch"


@dataclass(frozen=True)
class Place:
    """A folder of tiny runs, and a way to start programs in it."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **{"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"},
            **{"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
            **{name: str(self.folder / "xdg") for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME")},
        }

    def start(self, program: str, *flags: str) -> None:
        """Run a program to its end, as users start it."""
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, str(REPOSITORY / program), *flags]
        how = {"cwd": self.folder, "env": plain | self.environment, **TO_ITS_END}
        worked(subprocess.run(command, **how))

    def call(self, program: str, *flags: str) -> Done:
        """Call a program in this process."""
        verb = program.removeprefix("gpt2lab ")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            word = verb if verb != program else REPOSITORY / program
            return call(word, *flags, folder=self.folder)

    def events(self, run: str) -> list[dict[str, Any]]:
        lines = (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def write_text(folder: Path) -> None:
    """Write made-up words, the same bytes on every machine (Python's own library differs by version)."""
    rng = np.random.RandomState(11)
    syllables = ["ka", "lo", "mi", "ten", "sur", "vel", "dra", "po"]
    words = ["".join(rng.choice(syllables, rng.randint(1, 4))) for _ in range(60)]
    folder.mkdir()
    for index in range(2):
        documents = [" ".join(words[i] for i in rng.randint(0, 60, 40)) for _ in range(20)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
        (folder / f"notes_{index}.jsonl").write_text(lines)
    (folder / "book.txt").write_text(" ".join(words[i] for i in rng.randint(0, 60, 400)))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    """Prepare text; train one run that is stopped and resumed, a modern one, and one with LoRA; treat as read-only."""
    place = Place(tmp_path_factory.mktemp("contracts"))
    write_text(place.folder / "text")
    shutil.copy(ITEMS, place.folder / "items.jsonl")  # their tokens will be kept beside them
    flags = ["text", "--out=data", "--shard_tokens=3000", "--val_tokens=1500", "--num_workers=1"]
    place.start("scripts/prepare_data.py", *flags)
    # The same bytes as without resume, but also the events of a stop and of a resume.
    place.start(TRAIN, *BASE, "--stop_after_steps=5")
    with ThreadPoolExecutor(2) as pool:
        modern = pool.submit(place.start, TRAIN, *MODERN)
        place.start(TRAIN, *BASE, "--resume=latest")
        place.start(FINETUNE, *TUNED)
        modern.result()
    return place


@pytest.fixture(scope="module")
def golden() -> Iterator[dict[str, Any]]:
    """Return the snapshot; with UPDATE_GOLDEN=1, write what the tests put into it."""
    found = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    yield found
    if UPDATE:
        GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def compare(golden: dict[str, Any], name: str, found: Any) -> None:
    """Compare one section with the snapshot, or put it there."""
    if UPDATE:
        golden[name] = found
    assert name in golden, f"no {name} in {GOLDEN.name}; record it with UPDATE_GOLDEN=1"
    assert not (lines := [line for line, _ in differences(golden[name], found, name)]), lines


# Help


def read_help(text: str) -> dict[str, Any]:
    """Return flags, arguments and subcommands of a page of help, without what it says about them."""
    usage, *lines = text.splitlines()
    rows: list[tuple[str, str]] = []  # how it is typed, what is said of it
    for line in lines:
        if line.startswith(" " * 26) and rows:
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        elif found := re.match(r"  (--\w+(?: \S+)*|[A-Z_]+|[a-z-]+)(?: {2,}(.*))?$", line):
            rows.append((found[1], found[2] or ""))
    help: dict[str, Any] = {"flags": {}, "arguments": []}
    for typed, said in rows:
        default = re.search(r"\(default (.*)\)$", said)
        if typed.startswith("--"):
            name, _, kind = typed.partition(" ")
            help["flags"][name] = [kind, default[1] if default else ""]
        elif typed.isupper():
            help["arguments"].append(typed)
    if usage.endswith(" VERB [flags]"):
        help["subcommands"] = sorted(typed for typed, _ in rows)
    return help


def test_the_flags_of_every_program(golden, place):
    def ask(command: str) -> dict[str, Any]:
        return read_help(worked(place.call(command, "--help-all")).stdout)

    found = within = {name: ask(name) for name in PROGRAMS}
    while within:
        verbs = [f"{name} {v}" for name in within for v in within[name].get("subcommands", [])]
        within = {name: ask(name) for name in verbs}
        found = found | within
    assert sum(len(help["flags"]) for help in found.values()) > 300  # the help was really read
    compare(golden, "help", found)


# JSON


def shape(value: Any) -> Any:
    """Return the keys of a JSON value at every depth, with types instead of values."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        kinds = [shape(item) for item in value]
        return {"[]": merge(kinds)} if kinds else {"[]": "nothing"}
    return {bool: "bool", int: "int", float: "float", str: "str", type(None): "null"}[type(value)]


def merge(kinds: list[Any]) -> Any:
    """Return one shape for many: keys of all of them, types joined."""
    if all(isinstance(kind, dict) for kind in kinds):
        keys = dict.fromkeys(key for kind in kinds for key in kind)
        return {key: merge([kind[key] for kind in kinds if key in kind]) for key in keys}
    leaves = {"object" if isinstance(kind, dict) else part for kind in kinds for part in [kind]}
    return "|".join(sorted(leaves))


JSON_ANSWERS: dict[str, list[str]] = {
    "list": [TRAIN, "--list_checkpoints", "--checkpoint_dir=runs"],
    "list verified": [TRAIN, "--list_checkpoints", "--verify", "--checkpoint_dir=runs"],
    "list of nothing": [TRAIN, "--list_checkpoints", "--checkpoint_dir=nowhere"],
    "dry run": PLAN,
    "dry run of a resume": [TRAIN, "--dry_run", *OWN, "--resume=5"],
    "dry run of fine-tuning": TUNE,
    "preflight": [TRAIN, "--preflight", *FRESH],
    "evaluate": [
        *("scripts/evaluate.py", "runs/base", "--device=cpu", "--val=data", "--val_tokens=640"),
        *("--hellaswag", "--hellaswag_path=items.jsonl", "--hellaswag_limit=2"),
    ],
    "evaluate fine-tuned": ["scripts/evaluate.py", "runs/tuned", "--device=cpu"],
    "compare": ["gpt2lab compare", "base", "modern", "--checkpoint_dir=runs"],
    "replay": ["gpt2lab replay", "base", "--steps=7:8", "--layers", "--checkpoint_dir=runs"],
    "why-spike": [  # all four samples, whatever their order
        *("gpt2lab why-spike", "base", "--step=7", "--worst=4", "--checkpoint_dir=runs")
    ],
    "bisect": ["gpt2lab bisect", "base", "modern", "--checkpoint_dir=runs"],
    "status": ["gpt2lab status", "--checkpoint_dir=runs"],
    "export": ["scripts/export_hf.py", "runs/base", "--out=exported"],
    "doctor": ["gpt2lab doctor", "base", "--checkpoint_dir=runs"],
    "estimate of a run": [ESTIMATE, "--run_name=base", "--checkpoint_dir=runs"],
    "estimate of tokens": [ESTIMATE, "--gpu=H100", "--gpus=8", "--tokens=1B", *NOBODY],
    "estimate of a window": [ESTIMATE, "--gpu=H100", "--steps=100", "--deadline=12h", *NOBODY],
    "estimate that fits no window": [
        *(ESTIMATE, "--gpu=RTX-4090", "--tokens=100B", "--deadline=1h", *NOBODY)
    ],
    "estimate of models": [ESTIMATE, "--gpu=H100", "--compare=models", *NOBODY],
    "estimate of gpus": [ESTIMATE, "--gpu=H100", "--compare=gpus", *NOBODY],
    "estimate of profiles": [
        *(ESTIMATE, "--gpu=H100", "--compare=profiles", "--deadline=2d", *NOBODY)
    ],
    "accuracy": [ESTIMATE, "--accuracy", "--checkpoint_dir=runs"],
    "doctor of a run to come": ["gpt2lab doctor", "--gpu=H100", "--tokens=1B", *NOBODY],
}
# A preflight says NO-GO (1) where memory or disk of the machine are short.
EXITS = {"estimate that fits no window": (3,), "preflight": (0, 1), "bisect": (1,)}
# Null or not by the machine, by whether it is a clone, or by how fast it is.
MACHINES_OWN = re.compile(
    r"/(git|gpu|gpus|topology|mfu|driver|load_average|memory_available|free_gib|triton|transformers|warnings)(/|$)"
)


def without_machines_own(tree: Any, where: str = "") -> Any:
    if MACHINES_OWN.search(where):
        return "any"
    if isinstance(tree, dict):
        return {key: without_machines_own(item, f"{where}/{key}") for key, item in tree.items()}
    return tree


def test_the_keys_of_every_json_answer(golden, place):
    has_transformers = importlib.util.find_spec("transformers") is not None
    names = [name for name in JSON_ANSWERS if name != "export" or has_transformers]

    def ask(name: str) -> Any:
        answer = place.call(*JSON_ANSWERS[name], "--json")
        assert answer.returncode in EXITS.get(name, (0,)), f"{name}: {answer.stderr[-2000:]}"
        assert answer.stdout.count("\n") == 1, f"{name}: not one object on one line"
        return without_machines_own(shape(json.loads(answer.stdout)))

    found = {name: ask(name) for name in names}
    if "export" not in found:
        found["export"] = golden["json"]["export"]
    compare(golden, "json", found)


# Files


def tree(folder: Path) -> list[str]:
    """Return every file of a run, with what differs between two runs of the same flags taken out of its name."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return sorted({re.sub(r"events\.out\.tfevents.*", "events.out.tfevents.*", n) for n in names})


def test_the_files_of_a_run_and_their_keys(golden, place):
    runs = place.folder / "runs"
    trees = {name: tree(runs / name) for name in ("base", "modern", "tuned")}
    compare(golden, "files", trees | {"data": tree(place.folder / "data")})
    found: dict[str, Any] = {}
    for run, step in (("base", 8), ("tuned", 4)):
        folder = runs / run
        for name in ("run.json", "config.json", "status.json", "estimate.json"):
            found[f"{run}/{name}"] = shape(json.loads((folder / name).read_text()))
        for name in ("manifest.json", "state.json"):
            saved = json.loads((folder / f"step_{step:08d}" / name).read_text())
            found[f"{run}/step/{name}"] = shape(saved)
    found["shards.json"] = shape(json.loads((place.folder / "data" / "shards.json").read_text()))
    compare(golden, "keys", without_machines_own(found))


def test_the_keys_of_every_event(golden, place):
    found: dict[str, dict[str, Any]] = {}
    for run in ("base", "tuned"):
        for event in place.events(run):
            if event["event"] != "warning":  # what there is to warn of depends on the machine
                found.setdefault(f"{run} {event['event']}", []).append(shape(event))
    merged = {name: merge(kinds) for name, kinds in found.items()}
    compare(golden, "events", without_machines_own(merged))


# Refusals, beside those of a start, which tests/unit/commands/test_bad_input.py has to the letter

REFUSALS: dict[str, list[str]] = {
    "unknown flag of a script": ["gpt2lab status", "--wach=3"],
    **{f"renamed {name}": [TRAIN, f"--{name}=3"] for name in RENAMED.split()},
    "json alone": [TRAIN, *FRESH, "--json"],
    "bad run name": [*PLAN, "--run_name=a/b"],
    "unknown change": [*PLAN, *OWN, "--resume=5", "--allow_change=bogus"],
    "lock held": [TRAIN, *OWN, "--resume=5"],
    "fine-tuning from nothing": [*TUNE, "--init_from=nobody"],
    "fine-tuning without pairs": [*TUNE, "--instructions=no.jsonl"],
    "text missing": ["scripts/prepare_data.py", "nothing.txt", "--out=made"],
    "prepared otherwise": ["scripts/prepare_data.py", "text", "--out=data", "--max_tokens=900"],
    "verify of nothing": ["gpt2lab data", "verify", "nowhere"],
    "unknown subcommand": ["gpt2lab data", "repair", "data"],
    "evaluate nothing": ["scripts/evaluate.py", "nobody", "--checkpoint_dir=runs"],
    "unknown gpu": [ESTIMATE, "--gpu=H1000", *NOBODY],
    "lengths of a plan": [ESTIMATE, "--gpu=H100", "--tokens=1B", "--steps=5", *NOBODY],
    "run of another name": [ESTIMATE, "--run_name=nobody", "--checkpoint_dir=runs"],
    "fits no window": [ESTIMATE, "--gpu=RTX-4090", "--tokens=100B", "--deadline=1h", *NOBODY],
    "fits no memory": [ESTIMATE, "--gpu=RTX-4090", "--model=gpt2-xl", *NOBODY],
    "complete already": [TRAIN, *OWN, "--resume=latest"],
}


def refusal(answer: Done) -> dict[str, Any]:
    """Return what a program's caller can act on: the exit code, one line on stderr, the flags it names."""
    return {
        "exit code": answer.returncode,
        "one line on stderr": bool(re.fullmatch(r"error: .*\n", answer.stderr)),
        "stdout": bool(answer.stdout),
        "flags named": sorted(set(re.findall(r"--[a-z_]+", answer.stderr))),
    }


def test_what_is_refused_with_which_exit_code(golden, place):
    before = tree(place.folder)
    names = [name for name in REFUSALS if name != "lock held"]
    found = {name: refusal(place.call(*REFUSALS[name])) for name in names}
    with (place.folder / "runs" / "base" / "run.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found["lock held"] = refusal(place.call(*REFUSALS["lock held"]))
    assert tree(place.folder) == before
    compare(golden, "refusals", found)


# Losses


@pytest.mark.parametrize("run", ["base", "modern", "tuned"])
def test_losses_are_those_of_before(golden, place, run):
    """The highest attempt of each step."""
    found = {}
    for event in place.events(run):
        for key in ("loss", "grad_norm", "lr", "val_loss", "val_loss_se"):
            if key in event and event["event"] in ("step", "eval"):
                found[f"{event['event']} {event['step']} {key}"] = event[key]
    assert found
    if UPDATE:
        golden.setdefault("losses", {})[run] = found
    expected = golden["losses"][run]
    assert set(found) == set(expected)
    for name, value in expected.items():
        # A standard error is a spread of fp32 losses, and each of them is rounded.
        rounding = 2**-23 * expected[name.removesuffix("_se")] if name.endswith("_se") else 0.0
        assert found[name] == pytest.approx(value, rel=RELATIVE, abs=rounding), name


def test_what_steps_trained_on_is_that_of_before(golden, place):
    shards = json.loads((place.folder / "data" / "shards.json").read_text())
    found: dict[str, Any] = {f"{file['name']}": file["sha256"] for file in shards["files"]}
    for run in ("base", "modern", "tuned"):
        steps = [event for event in place.events(run) if event["event"] == "step"]
        found[run] = {str(event["step"]): event["batch_hash"] for event in steps}
    compare(golden, "batches", found)

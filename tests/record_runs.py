"""Record what fixed tiny runs compute and leave behind, and compare two recordings: a refactoring changes nothing.

python tests/record_runs.py OUT.json [--checkout PATH] [--begin_with PATH] [--only NAME,...] [--work PATH]
python tests/record_runs.py --compare A.json B.json [--only NAME,...]

The runs go through command lines alone, so that this file can also record an older checkout. Compare recordings of one
machine only: the bits of a matrix product depend on the processor. With --begin_with another checkout makes the first
start of every run that reads no other run, so that newer code resumes, evaluates and fine-tunes what older code began.

A recording holds exit codes, every event, the files of the run folder, settings, manifests and state. Times, sizes that
depend on them, and messages are replaced by `~`, folders by FOLDER and CHECKOUT. A key that only B has is reported as
`added` and is no difference; a new file is one.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiny import VOCAB, make_tokens, write_items, write_shards

COMPILED = Path(tempfile.gettempdir()) / f"gpt2lab-recordings-{os.getuid()}"
TO_ITS_END: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600}

# Keys of values that depend on the clock, the load of the machine, git, or the wording of a message.
VOLATILE = re.compile(
    r"time|seconds|(?!hang_).+_seconds|.+_per_second|mfu|peak_memory_bytes|on_track|message|provenance|created|bytes"
    r"|manifest_sha256|from_cache|folder"
)

TINY = "--n_layer=2 --n_head=2 --n_embd=32 --mini_batch_size=2 --log_freq=1000 --val_tokens=320"
FP32 = "--device=cpu --dtype=fp32 --compile=off"
SAVES = "--eval_freq=4 --checkpoint_freq=4"
SHAPE = f"{TINY} --context_length=16 --vocab_size={VOCAB} --total_batch_size=128 {FP32}"
PLAIN = f"{SHAPE} --data_dir=FOLDER/data"
EIGHT = f"{PLAIN} {SAVES} --max_steps=8"
FIVE = f"{EIGHT} --stop_after_steps=5"
LATEST = "--resume=latest"
SPIKE = (
    f"{SHAPE} --data_dir=FOLDER/spike --shuffle=none --max_lr=0.01 --warmup_steps=10"
    " --max_steps=150 --eval_freq=0 --checkpoint_freq=50"
)
VOCABULARY = (
    f"{TINY} {FP32} --data_dir=FOLDER/data --context_length=64 --total_batch_size=256 --max_steps=4"
    " --eval_freq=2 --hellaswag_freq=2 --hellaswag_path=FOLDER/items.jsonl --sample_freq=2 --sample_tokens=4"
)
FINETUNE = (
    f"{TINY} {FP32} --init_from=FOLDER/runs/vocabulary --instructions=FOLDER/pairs.jsonl"
    " --total_batch_size=256 --max_steps=6 --eval_freq=3 --sample_tokens=2 --max_lr=0.01"
)


@dataclass(frozen=True)
class Start:
    """One start of a program; FOLDER in `flags` is the recording's folder. `fault` is FAULT of checkpoint/faults.py."""

    flags: str
    world: int = 1
    fault: str = ""
    program: str = "src/train.py"


def two(flags: str) -> Start:
    """Return a start of the trainer on two processes."""
    return Start(flags, world=2)


def tune(flags: str) -> Start:
    """Return a start of fine-tuning."""
    return Start(flags, program="src/finetune.py")


def evaluate(flags: str) -> Start:
    """Return an evaluation that prints JSON."""
    return Start(f"{flags} --json", program="scripts/evaluate.py")


# {name of the run: its starts}; text is the flags of a start of the trainer. A case that names FOLDER/runs/NAME waits
# for that case, which is listed above it.
CASES: dict[str, tuple[Start | str, ...]] = {
    "compiled": (f"{PLAIN} {SAVES} --compile=on --max_steps=4",),
    "vocabulary": (VOCABULARY,),
    "plain": (f"{PLAIN} {SAVES} --max_steps=26", LATEST),
    "ddp": (two(FIVE), two(LATEST)),
    "zero1": (two(f"{FIVE} --parallel=zero1"), two(f"{LATEST} --parallel=fsdp")),
    "fsdp": (two(f"{FIVE} --parallel=fsdp"), LATEST),
    "muon": (f"{FIVE} --optimizer=muon --muon_lr=0.002", LATEST),
    "muon_zero1": (two(f"{EIGHT} --optimizer=muon --parallel=zero1"),),
    "normuon": (f"{EIGHT} --optimizer=normuon",),
    "dropout": (f"{FIVE} --dropout=0.1", LATEST),
    "bf16": (f"{EIGHT} --dtype=bf16",),
    "windows": (f"{PLAIN} {SAVES} --shuffle=windows --max_steps=26",),
    "mixture": (
        f"{SHAPE} {SAVES} --max_steps=16 --data_dir FOLDER/data:0.6 FOLDER/other:0.4"
        " --data_weights_at 1000:0.1,0.9 --stop_after_steps=9",
        LATEST,
    ),
    "modern": (
        f"{FIVE} --positions=rotary --norm=rmsnorm --qk_norm=rmsnorm --activation=relu2"
        " --activation_checkpointing=block",
        LATEST,
    ),
    "speedrun": (f"{FIVE} --model=speedrun", LATEST),
    "schedule": (f"{EIGHT} --lr_schedule=wsd --warmup_steps=2 --min_lr=0.0001 --seed=7",),
    "micro_batches": (f"{FIVE} --mini_batch_size=1", f"{LATEST} --mini_batch_size=4"),
    "killed": (Start(EIGHT, fault="step:kill9@7"), LATEST),
    "killed_saving": (Start(EIGHT, fault="checkpoint.before_rename:kill9@8"), LATEST),
    "terminated": (Start(EIGHT, fault="step:term@6"), LATEST),
    "async": (f"{PLAIN} {SAVES} --async_checkpoint=on --max_steps=12",),
    "exact": (two(f"{FIVE} --reduce=exact"), LATEST),
    "changed": (FIVE, f"{LATEST} --max_lr=0.001 --allow_change=max_lr"),
    "unchanged": (FIVE, f"{LATEST} --max_lr=0.001", LATEST),  # the second is rejected
    "longer": (EIGHT, f"{LATEST} --max_steps=12 --allow_change=max_steps"),
    "early_stop": (f"{PLAIN} --max_lr=1 --eval_freq=1 --early_stopping_patience=2 --max_steps=20",),
    "spike_skip": (f"{SPIKE} --on_spike=skip",),
    "spike_rewind": (f"{SPIKE} --on_spike=rewind",),
    "max_tokens": (f"{PLAIN} {SAVES} --max_tokens=700",),
    "num_epochs": (f"{PLAIN} {SAVES} --num_epochs=1.2 --keep_checkpoints=2",),
    "watched": (f"{EIGHT} --use_tensorboard --histogram_freq=4 --keep_token_losses",),
    "mirror": (f"{EIGHT} --checkpoint_mirror=file://FOLDER/mirror",),
    "config_file": ("--config=FOLDER/runs/plain/config.json --max_steps=8",),
    "init_from": (f"{EIGHT} --init_from=FOLDER/runs/plain",),
    "rejected": (f"{EIGHT} --total_batch_size=100", f"{EIGHT} --max_stepz=3"),
    "evaluated": (
        evaluate("FOLDER/runs/plain"),
        evaluate("FOLDER/runs/plain/step_00000020 --val=FOLDER/other"),
    ),
    "evaluated_hellaswag": (evaluate("FOLDER/runs/vocabulary --hellaswag"),),
    "lora": (tune(f"{FINETUNE} --lora_r=2 --stop_after_steps=4"), tune(LATEST)),
    "finetuned": (tune(FINETUNE),),
}
UNORDERED = ("async", "mirror")  # another process records events there, between any two steps


def write_inputs(work: Path) -> None:
    """Write what the runs read."""
    write_shards(work / "data", train=(1003, 777, 1290), val=(650,))
    write_shards(work / "other", train=(901, 555), val=(407,))
    write_shards(work / "spike", train=(), val=(650,))
    noise = np.random.RandomState(0).randint(VOCAB, size=384).astype(np.uint16)  # 3 steps
    easy = [make_tokens(140 * 128, seed) % 16 for seed in (1, 2)]
    np.save(work / "spike" / "tiny_train_000000.npy", np.concatenate([easy[0], noise, easy[1]]))
    write_items(work / "items.jsonl")
    pairs = [
        {"instruction": "Count." + " up" * (n % 4), "output": f"{n} {n + 1}" + " on" * (n % 3)}
        for n in range(24)
    ]
    (work / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (work / "mirror").mkdir()


def run_start(start: Start, name: str, work: Path, checkout: Path) -> dict[str, Any]:
    """Run a program of the checkout to its end; return its exit code, and the JSON that it printed if asked for any."""
    command = [sys.executable]
    if start.world > 1:
        torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={start.world}"
        command += torchrun.split()
    command += [start.program, *start.flags.replace("FOLDER", str(work)).split()]
    command += [f"--checkpoint_dir={work / 'runs'}"]
    if start.program.startswith("src/"):
        command += [f"--run_name={name}"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(checkout)]),
        **{"OMP_NUM_THREADS": "1", "FAULT": start.fault, "TMPDIR": str(work)},
        **{"XDG_CONFIG_HOME": str(work / "config"), "TORCHINDUCTOR_CACHE_DIR": str(COMPILED)},
    }
    done = subprocess.run(command, cwd=checkout, env=environment, **TO_ITS_END)
    with open(work / f"{name}.txt", "a") as said:
        print("$", *command, f"\n{done.stdout}{done.stderr}", file=said)
    printed = json.loads(done.stdout) if "--json" in start.flags and done.stdout else None
    return {"exit_code": done.returncode, "printed": printed}


def record_folder(run: Path) -> dict[str, Any]:
    """Return what a run left: its events, settings, checkpoints, and every file below its folder."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]]
    for event in events:
        event.pop("crc", None)  # of the whole line, also of the time; readers check it
    if run.name in UNORDERED:
        events.sort(key=lambda event: (event["attempt"], event["step"], event["event"]))
    status = json.loads((run / "status.json").read_text())
    files = {}
    for path in filter(Path.is_file, sorted(run.rglob("*"))):
        name = re.sub(r"tfevents\..*", "tfevents", str(path.relative_to(run)))
        if path.suffix == ".safetensors":
            files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            files[name] = path.read_text() if path.parent.name == "labels" else "~"
    checkpoints = {}
    for folder in sorted(run.glob("step_*")):
        files_of = (folder / f"{name}.json" for name in ("manifest", "state"))
        manifest, state = (json.loads(file.read_text()) for file in files_of)
        manifest["files"] = sorted(manifest["files"])  # their hashes are in `files`
        checkpoints[folder.name] = {"manifest": manifest, "state": state}
    return {
        "events": events,
        "config": json.loads((run / "config.json").read_text()),
        "status": {key: status[key] for key in ("state", "reason", "exit_code", "step", "attempt")},
        "run": dict.fromkeys(json.loads((run / "run.json").read_text()), "~"),
        "files": files,
        "checkpoints": checkpoints,
    }


def normalize(value: Any, names: dict[str, str]) -> Any:
    """Return a JSON value without volatile values, each folder replaced by its name, long values by their hash."""
    if isinstance(value, dict):
        return {
            key: "~" if VOLATILE.fullmatch(key) else normalize(inner, names)
            for key, inner in value.items()
        }
    if isinstance(value, list) and len(value) < 600:  # random states are longer
        return [normalize(inner, names) for inner in value]
    if isinstance(value, str):
        for folder, name in names.items():
            value = value.replace(folder, name)
    text = json.dumps(value)
    return value if len(text) < 1000 else hashlib.sha256(text.encode()).hexdigest()


def record_case(name: str, work: Path, begin_with: Path, checkout: Path) -> dict[str, Any]:
    """Run a case and return its recording."""
    began = time.monotonic()
    recording: dict[str, Any] = {"starts": []}
    run = work / "runs" / name
    try:
        for start in CASES[name]:
            start = Start(start) if isinstance(start, str) else start
            later = recording["starts"] or needs(name)
            done = run_start(start, name, work, checkout if later else begin_with)
            recording["starts"].append(done)
        if run.exists():
            recording |= record_folder(run)
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        recording["failed"] = repr(error)
    codes = [start["exit_code"] for start in recording["starts"]]
    print(name, codes, f"{time.monotonic() - began:.0f} s", recording.get("failed", ""), flush=True)
    names = {str(work): "FOLDER", str(checkout): "CHECKOUT", str(begin_with): "CHECKOUT"}
    return normalize(recording, names)


def needs(name: str) -> set[str]:
    """Return the cases whose runs a case reads."""
    return set(re.findall(r"FOLDER/runs/(\w+)", repr(CASES[name])))


def record(wanted: list[str], work: Path, begin_with: Path, checkout: Path) -> dict[str, Any]:
    """Run the named cases, and those that they read, two at a time; return {name: recording}."""
    write_inputs(work)
    wanted = [*wanted, *(other for name in wanted for other in needs(name))]
    running: dict[str, concurrent.futures.Future[dict[str, Any]]] = {}

    def run(name: str) -> dict[str, Any]:
        for other in needs(name):
            running[other].result()  # it began earlier, so a thread works on it
        return record_case(name, work, begin_with, checkout)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for name in CASES:
            if name in wanted:
                running[name] = threads.submit(run, name)
    return {name: future.result() for name, future in running.items()}


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield each difference as (one line, whether it is only an added key)."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            place = f"{path}/{key}"
            if key not in b:
                yield f"{place}: removed, was {_short(a[key])}", False
            elif key not in a:
                allowed = not path.endswith("/files") and key != "failed"
                yield f"{place}: added, {_short(b[key])}", allowed
            else:
                yield from differences(a[key], b[key], place)
    elif isinstance(a, list) and isinstance(b, list):
        for number, (left, right) in enumerate(zip(a, b, strict=False)):
            yield from differences(left, right, f"{path}/{number}")
        if len(a) != len(b):
            yield f"{path}: {len(a)} -> {len(b)} entries", False
    elif json.dumps(a) != json.dumps(b):  # as text: NaN equals NaN, and 1 differs from 1.0
        yield f"{path}: {_short(a)} -> {_short(b)}", False


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def compare(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Print one line for each difference; return 1 if there is one that is more than an added key."""
    found = list(differences(a, b))
    # An added key of all events or checkpoints is one line.
    added = {re.sub(r"/(step_)?\d+(?=/)", "/*", line): None for line, allowed in found if allowed}
    wrong = [line for line, allowed in found if not allowed]
    print(*added, *wrong, f"{len(a)} runs, {len(wrong)} differences", sep="\n")
    return 1 if wrong else 0


def main(argv: list[str]) -> int:
    """Record, or compare two recordings; return the exit code."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--begin_with", type=Path)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--work", type=Path, help="new folder that keeps the runs and their output")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"))
    flags = parser.parse_args(argv)
    wanted = flags.only.split(",")
    if (flags.out is None) == (flags.compare is None) or not set(wanted) <= set(CASES):
        parser.error(f"OUT.json or --compare A.json B.json; --only takes {', '.join(CASES)}")
    if flags.compare:
        a, b = (json.loads(path.read_text()) for path in flags.compare)
        return compare(*({name: each[name] for name in wanted if name in each} for each in (a, b)))
    checkout = flags.checkout.resolve()
    begin_with = (flags.begin_with or checkout).resolve()
    with tempfile.TemporaryDirectory(prefix="recording-") as temporary:
        work = (flags.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        recording = record(wanted, work, begin_with, checkout)
    flags.out.write_text(json.dumps(recording, indent=1) + "\n")
    return 1 if any("failed" in case for case in recording.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Every command that a program tells to run works, in the state in which it is told."""

import json
import re
import shlex
import socket
from collections import deque
from pathlib import Path

import pytest

import served
from gpt2lab import paths
from gpt2lab.commands.verbs import VERBS
from launch import REPOSITORY, Done, call, steps

TEXT = "To be, or not to be: that is the question.\n\nWhether tis nobler in the mind to suffer.\n"
TRAIN = (
    "train --model gpt2-nano --data_dir data/text --run_name r --n_embd 32 --max_steps 4 --total_batch_size 512 "
    "--mini_batch_size 4 --val_tokens 512 --sample_tokens 4 --max_lr 0.01"
)
HERE = ("--device=cpu", "--compile=off")
MORE = {"train": HERE, "finetune": HERE, "prepare": ()}  # what a hint leaves to the machine


def hints(text: str) -> list[tuple[str, ...]]:
    """Return the words of each command of `gpt2lab` that a text ends a line with."""
    parts = [part for line in text.splitlines() for part in line.split(" && ")]
    found = [re.search(r"(?:^|[\s/])gpt2lab ([a-z-]+(?: .*)?)$", part) for part in parts]
    words = [tuple(shlex.split(match[1])) for match in found if match]
    return [one for one in words if one[0] in VERBS]


def run(words: tuple[str, ...], folder: Path) -> Done:
    """Run a command in this process; what is interactive reads one line."""
    more = MORE.get(words[0], ())
    if words[0] == "serve":
        with served.program(*words[1:], "--device=cpu", f"--checkpoint_dir={folder}/checkpoints"):
            return Done(0, "", "")
    if words == ("runs", "tensorboard"):
        with socket.create_server(("localhost", 0)) as free:
            more = (f"--port={free.getsockname()[1]}",)
    done = call(words[0], *words[1:], *more, folder=folder, stdin="Who are you?\n")
    assert done.returncode == 0, (words, done.stderr)
    return done


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return a checkout with a text."""
    monkeypatch.setattr(paths, "REPOSITORY", tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{n}. {TEXT}" for n in range(400)))
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")  # TensorBoard runs on
@pytest.mark.parametrize("tokenizer", ["bytes", "characters.json"])
def test_every_command_that_a_run_tells_works(folder, tokenizer):
    letters = "".join(sorted(set(TEXT + "0123456789")))
    characters = {"characters": letters, "end_of_text": "<|endoftext|>"}
    (folder / "characters.json").write_text(json.dumps(characters))
    prepared = run(("prepare", "text.txt", "--tokenizer", tokenizer), folder)
    (first,) = hints(prepared.stdout)
    run((*first, "--stop_after_steps=1", "--run_name=of_the_hint"), folder)
    told = deque(hints(run(tuple(TRAIN.split()), folder).stdout))
    seen: set[tuple[str, ...]] = set()
    while told:
        words = told.popleft()
        # A complete run tells how to train it on: once for each run.
        key = words[:3] if words[0] in ("train", "finetune") else words
        if key not in seen:
            seen.add(key)
            told += hints(run(words, folder).stdout)
    verbs = {key[0] for key in seen}
    told_to_chat = {"finetune", "chat"} if tokenizer == "bytes" else set()
    assert verbs == {"train", "sample", "serve", "report", "runs"} | told_to_chat
    if told_to_chat:
        taken = steps(folder / "checkpoints" / "r_chat")
        assert taken[300]["loss"] < 0.5 * taken[1]["loss"]


def break_log(folder: Path) -> None:
    with open(folder / "checkpoints" / "r" / "metrics.jsonl", "a") as log:
        log.write("{not JSON\n")


@pytest.mark.parametrize(
    ("typed", "spoil", "told"),
    [
        ("train --run_name r", None, r"continue it with (--run_name r --resume latest), or"),
        ("train --run_name r", None, r"or start another with (--run_name r_2)$"),
        ("compare r r --explain", None, r" with gpt2lab (evaluate r --keep_token_losses)$"),
        ("report r", break_log, r"left out, gpt2lab (runs repair-log \S+) removes it"),
        ("status rr", None, r"did you mean (\w+)\?"),
    ],
)
def test_what_an_error_tells_to_run_mends_it(folder, typed, spoil, told):
    run(("prepare", "text.txt", "--tokenizer", "bytes"), folder)
    run(tuple(TRAIN.split()), folder)
    if spoil is not None:
        spoil(folder)
    verb, *words = typed.split()
    begun = TRAIN.split()[1:] if verb == "train" else []  # else the hint lacks what was typed
    before = call(verb, *begun, *words, *MORE.get(verb, ()), folder=folder)
    [hint] = re.findall(told, before.stderr)
    if hint.split()[0] in VERBS:
        run(tuple(hint.split()), folder)
        after = run((verb, *words), folder)
    else:
        kept = () if "--resume" in hint else begun
        after = run((verb, *kept, *hint.split()), folder)
    assert not re.search(told, after.stderr)


# Parts of documented commands that another test runs, or that need what no test machine has.
ELSEWHERE = re.compile(
    r"fineweb|hf:|s3:|--gpus?\b|--preset|--ray|benchmark|\.\./|/mnt|megatron/|tokenized/|openwebtext/|--push_to_hub|"
    r"--track|trackio|--tasks|ladder|ablat|--preflight|--hellaswag|--deadline|\.pt\b|shakespeare|groups|_seed|--measure|"
    r"--run_name run_a|--part|merge|tokenizer|python_32k|RUN|NAME|gpt2-124m|--data_dir data/|--run mixed|serve|--num_w|"
    r"--watch|old_run|--core|--branch_from|climbmix|--array| mixed"
)
SHRUNK = [  # of `train`, over what it is told
    *("--n_layer=1", "--n_head=1", "--n_embd=32", "--context_length=32", "--mini_batch_size=4"),
    *("--total_batch_size=512", "--val_tokens=256", "--sample_tokens=4", *HERE),
]
LESS = {
    "train": [*SHRUNK, "--stop_after_steps=2"],
    "finetune": ["--stop_after_steps=2", *HERE],
    "evaluate": ["--device=cpu"],
    "sample": ["--max_new_tokens=2", "--device=cpu"],
    "chat": ["--max_new_tokens=2", "--device=cpu"],
}


def documented() -> list[list[str]]:
    """Return the commands of the pages that this machine can run, in their order; getting_started has its own test."""
    found = []
    for page in sorted((REPOSITORY / "docs").glob("*.md")):
        blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.S)
        lines = "".join(blocks).replace("\\\n", " ").splitlines()
        if page.stem != "getting_started":
            found += [x for x in lines if x.startswith("gpt2lab ") and not ELSEWHERE.search(x)]
    words = [shlex.split(line, comments=True)[1:] for line in found]
    return list({frozenset(one): one for one in words}.values())


@pytest.mark.slow
def test_every_documented_command_runs(tmp_path, monkeypatch):
    """After a quickstart, with two runs to compare and a folder of texts."""
    monkeypatch.setattr(paths, "REPOSITORY", tmp_path)
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "a.txt").write_text("".join(f"{n}. {TEXT}" for n in range(900)))
    (tmp_path / "prompts.txt").write_text("To be\n")
    ready = ["--data_dir=data/python_stdlib", *SHRUNK, "--eval_freq=50", "--checkpoint_freq=20"]
    for words in (
        ["prepare", "my_texts", "--out=data/python_stdlib", "--val_tokens=3000"],
        *(
            ["train", *ready, f"--run_name={name}", f"--max_steps={last}", "--keep_token_losses"]
            for name, last in (("run_a", 5), ("run_b", 5), ("quickstart-1", 200))
        ),
        ["evaluate", "run_a", "--save=results/gpt2", "--device=cpu"],
    ):
        assert call(*words, folder=tmp_path).returncode == 0
    failed = {}
    for words in documented():
        done = call(words[0], *words[1:], *LESS.get(words[0], ()), folder=tmp_path, stdin="a\n")
        if done.returncode:
            failed[" ".join(words)] = done.stderr
    assert not failed, "\n".join(f"{k}: {v}" for k, v in failed.items())

"""Runs that begin with the full state of another run's checkpoint: bits, cooldowns, lineage, rejections."""

from __future__ import annotations

import html
import shutil

import pytest

import launch
from gpt2lab.commands.runs import verify_log
from gpt2lab.errors import GPT2LabError
from gpt2lab.report import curves
from gpt2lab.report.page import render
from gpt2lab.runs import history
from gpt2lab.runs.overview import lineage
from tiny import resolved, write_shards
from whole_run import Run

WSD = ("--lr_schedule=wsd", "--warmup_steps=2", "--max_steps=20", "--checkpoint_freq=4")
RATE, FLOOR = 6e-4, 6e-5


@pytest.fixture(scope="module")
def trunk(tiny_run) -> Run:
    """Return a run of 20 steps with constant rate up to step 16; treat as read-only."""
    run = tiny_run(*WSD, "--eval_freq=4")
    run.train()
    return run


def branch(trunk: Run, name: str, *flags: str) -> Run:
    """Return a run beside another, with only the flags that it was branched with."""
    run = Run(trunk.path, trunk.path.parent, name=name)
    run.flags = [f"--checkpoint_dir={trunk.path.parent}", f"--run_name={name}", *flags]
    return run


def test_an_unchanged_branch_is_the_run_itself_and_leaves_it_alone(trunk):
    before = trunk.listing()
    found = branch(trunk, "same", "--branch_from=tiny@8")
    found.train()
    after = trunk.listing()
    folder = str(trunk.path)  # has one more file: the record of its branches
    assert {name: after[name] for name in before} | {folder: before[folder]} == before
    steps, *files = found.bits()
    assert steps == {step: loss for step, loss in trunk.bits()[0].items() if step > 8}
    assert tuple(files) == trunk.bits()[1:]
    ours, theirs = found.saved_state(20), trunk.saved_state(20)
    assert ours | {"train_seconds": 0} == theirs | {"train_seconds": 0}
    (resume,) = found.events("resume")
    assert (resume["level"], resume["verified_batches"]) == ("bit-identical", [8, 9])
    assert (resume["verified_lr"], found.events("step")[0]["attempt"]) == (RATE, 1)
    assert [event["step"] for event in found.events("eval")] == [12, 16, 20]
    places = curves._Places(history.read_log(found.path)).of([8, 9])
    assert places["tokens"].tolist() == [
        8 / 9 * found.steps()[9]["tokens"],
        found.steps()[9]["tokens"],
    ]


@pytest.mark.parametrize(("world", "mode"), [(1, None), *launch.slow((2, "ddp"), (2, "zero1"))])
def test_a_branch_of_the_last_step_is_a_plain_continuation(trunk, tmp_path, world, mode):
    longer = ("--max_steps=26", "--allow_change=max_steps")
    run = Run(trunk.path, tmp_path)
    run.flags = [f"--checkpoint_dir={tmp_path}", "--run_name=tiny"]
    begin = ["--lr_schedule=cosine", "--max_steps=20", *[f"--parallel={mode}"] * (world > 1)]
    run.train(*trunk.flags, *run.flags, *begin, world=world)
    other = branch(run, "other", "--branch_from=tiny@latest", *longer)
    other.train(world=world)
    assert [event["level"] for event in other.events("resume")] == ["changed"]
    run.train("--resume=latest", *longer, world=world)
    steps, *files = run.bits()
    assert other.bits() == ({n: loss for n, loss in steps.items() if n > 20}, *files)


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_a_cooldown_falls_from_the_step_and_resumes_to_the_same_bits(trunk, shape):
    flags = ("--branch_from=tiny@8", f"--wsd_shape={shape}")
    straight = branch(trunk, f"straight_{shape}", *flags, "--cooldown=6")
    straight.train()
    share = [n / 6 if shape == "linear" else (n / 6) ** 0.5 for n in range(1, 7)]
    wanted = {8 + n: RATE - (RATE - FLOOR) * share[n - 1] for n in range(1, 7)}
    rates = {event["step"]: event["lr"] for event in straight.events("step")}
    assert rates == pytest.approx(wanted, rel=1e-12)
    cut = branch(trunk, f"cut_{shape}", "--resume=auto", *flags, "--cooldown=0.768k")
    cut.train("--stop_after_steps=11")
    cut.train()
    assert [event["level"] for event in cut.events("resume")] == ["changed", "bit-identical"]
    assert cut.bits() == straight.bits()
    cut.train()  # the same command once more: complete
    assert (cut.bits(), verify_log(cut.path)[0]) == (straight.bits(), [])


def test_a_branch_records_where_it_began_also_after_a_resume(trunk):
    run = branch(trunk, "records", "--branch_from=tiny@016", "--cooldown=2", "--resume=auto")
    run.train("--stop_after_steps=17")
    run.train()
    found = trunk.checkpoints()[16]
    record = {"run": "tiny", "step": 16, "folder": str(found.path)}
    record["manifest_sha256"] = found.manifest["manifest_sha256"]
    assert run.events("begin")[0]["branch_from"] == record
    assert run.checkpoints()[18].manifest["branch_from"] == record
    assert history.read_json(run.path / "run.json")["branch_from"] == record
    assert "began at tiny@16" in str(run.rejected("--branch_from=tiny@12"))
    again = branch(trunk, "again", "--branch_from=records@18", "--max_steps=20")
    assert "decays there already" in str(again.rejected())
    assert not again.path.exists()


def test_lists_and_reports_draw_the_tree(trunk):
    for name, of in (("first", "tiny@8"), ("second", "tiny@12")):
        found = branch(trunk, name, f"--branch_from={of}", "--cooldown=1")
        found.train()
    lines = lineage(trunk.path.parent)
    assert lines[0] == "tiny"
    assert "├── first @8" in lines
    assert "@12" in next(line for line in lines if "second" in line)
    listed = launch.call("runs list", trunk.path).stdout
    for text in (listed, html.unescape(render(trunk.path)), html.unescape(render(found.path))):
        assert "\n".join(lines) in text


def test_a_run_lists_its_branches_in_other_folders_while_they_exist(trunk, tmp_path):
    away = branch(trunk, "away", f"--branch_from={trunk.path}@12", "--cooldown=1")
    away.path = tmp_path / "away"
    away.train(f"--checkpoint_dir={tmp_path}")
    assert any(line.endswith("away @12") for line in lineage(trunk.path.parent))
    assert lineage(tmp_path) == ["tiny (not here)", "└── away @12"]
    shutil.rmtree(away.path)
    assert not any("away" in line for line in lineage(trunk.path.parent))
    record = trunk.path / "branches.jsonl"
    kept = record.read_bytes()
    record.unlink()
    record.mkdir()
    away.train(f"--checkpoint_dir={tmp_path}")
    (warning,) = [event for event in away.events("warning") if "branches.jsonl" in event["message"]]
    assert "will not list this branch" in warning["message"]
    record.rmdir()
    record.write_bytes(b'not json\n{"folder": 3, "step": 1}\n' + kept)
    assert any(line.endswith("away @12") for line in lineage(trunk.path.parent))


OF_8 = (  # what does not go with a branch of step 8
    *("run_name=tiny", "resume=latest", "max_lr=0.1", "n_layer=3", "cooldown=5 --max_steps=30"),
    *("cooldown=5 --wsd_decay=0.5", "cooldown=long", "cooldown=", "cooldown=0", "cooldown=0.1k"),
    *("max_steps=9", "max_steps=8", "list_checkpoints"),
)


@pytest.mark.parametrize(
    "typed",
    [
        *("--cooldown=5", "--branch_from=tiny@20 --cooldown=5"),
        *(f"--branch_from=tiny{at}" for at in ("@7", "", "@last", "@20")),
        *(f"--branch_from=tiny@8 --{flags}" for flags in OF_8),
    ],
)
def test_what_cannot_be_a_branch_is_one_line_and_nothing_written(trunk, typed, wording):
    before = sorted(trunk.path.parent.iterdir())
    wording(branch(trunk, "rejected").rejected(*typed.split()))
    assert sorted(trunk.path.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("trained", "flags"),
    [
        (("--max_steps=4", "--checkpoint_freq=2"), "--branch_from=tiny@2 --cooldown=2"),
        ((*WSD, "--warmup_steps=6", "--stop_after_steps=4"), "--branch_from=tiny@4 --cooldown=2"),
        (("--max_steps=2",), "--branch_from=nobody@2"),
    ],
    ids=["a cosine", "a warm-up", "nobody"],
)
def test_a_run_that_cannot_be_cooled_down_or_is_not_there(tiny_run, trained, flags, wording):
    run = tiny_run(*trained)
    run.train()
    wording(branch(run, "b", *flags.split()).rejected())


def test_a_damaged_or_vanished_checkpoint_is_one_line_and_stays(trunk, tmp_path):
    folder = shutil.copytree(trunk.path, tmp_path / "tiny")
    copy = Run(trunk.path, tmp_path)
    run = branch(copy, "b", "--branch_from=tiny@8", "--cooldown=2")
    start = resolved(run.flags)
    assert start.branch is not None
    weights = folder / "step_00000008" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert "sha256 does not match" in str(run.rejected())
    assert weights.exists()
    shutil.rmtree(weights.parent)
    assert "there are: " in str(run.rejected())
    (folder / "step_00000020" / "manifest.json").write_text("{}")
    newest = branch(copy, "b", "--branch_from=tiny@latest", "--cooldown=2")
    assert "step_00000020" in str(newest.rejected())  # no older one in its place
    assert not run.path.exists()


def test_other_data_need_permission(trunk, tiny_run, tmp_path):
    other = write_shards(tmp_path / "other", train=(900, 800), val=(400,))
    run = branch(trunk, "moved", "--branch_from=tiny@8", "--cooldown=2", f"--data_dir={other}")
    rejected: GPT2LabError = run.rejected()
    assert "--allow_change data" in str(rejected)
    run.train("--allow_change=data")
    assert run.events("step")[0]["first_sample"] == 0

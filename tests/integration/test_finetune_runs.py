"""Runs of fine-tuning: logged, resumed, shared, rejected and looked at as in pretraining."""

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import launch
from conversations import CONTEXT, finetune, flags_of, rows_of, write_both
from gpt2lab.commands.command_line import TUNING_DEFAULTS
from gpt2lab.commands.data import tokens_as_text as describe_tokens
from gpt2lab.commands.data import tokens_of_step
from gpt2lab.commands.preflight import preflight
from gpt2lab.commands.resume_command import ResumeCommand, plan_continuation, write
from gpt2lab.config.presets import preset
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import ConfigError, GPT2LabError
from gpt2lab.finetuning.recipe import FINETUNING
from gpt2lab.report.page import render
from gpt2lab.tokenizers.chat_template import as_prompt
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS
from tiny import parse, pretrain

FINETUNE = launch.REPOSITORY / "src" / "finetune.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a model, pairs, and the finished run `whole`; treat as read-only."""
    folder = write_both(tmp_path_factory.mktemp("finetune"))
    finetune(flags_of(folder, folder / "runs", "whole"))
    return folder


def test_a_run_is_replayed_from_its_own_conversations(folder, tmp_path):
    more = ("--checkpoint_freq=2", "--stop_after_steps=3")
    for packing in ("on", "off"):
        finetune(flags_of(folder, tmp_path, packing, f"--packing={packing}", *more))
        assert "bitwise as logged" in launch.call("replay", tmp_path / packing, "--steps=3").stdout
        said = launch.call("why-spike", tmp_path / packing, "--step=3").stdout
        assert "sample 8: " in said
        assert "end of text" not in said, "padding is no pattern"
    for words in (("replay", "--steps=3"), ("data", "show", "--step=3", "--run")):
        done = launch.call(*words, tmp_path / "on", f"--data_dir={folder}")
        line = "--data_dir: the run was fine-tuned on --instructions; omit it"
        assert (done.returncode, line in done.stderr) == (2, True)


def test_a_run_learns_and_is_logged_like_any(folder):
    run = folder / "runs" / "whole"
    steps, evals = launch.steps(run), launch.events(run, "eval")
    assert (list(steps), [event["step"] for event in evals]) == ([1, 2, 3, 4, 5, 6], [0, 3, 6])
    assert evals[-1]["val_loss"] < evals[0]["val_loss"] - 0.1
    assert evals[0]["val_tokens"] == rows_of(folder, "on")["val"].targets()
    for step, event in steps.items():
        assert event["tokens"] == 4 * CONTEXT * step
        assert event["tokens_per_second"] == pytest.approx(4 * CONTEXT / event["step_seconds"])
        assert 0 < event["targets"] < 4 * CONTEXT / 2  # answers alone
    assert f"tok/s | targets {steps[1]['targets']} | eta" in (run / "log.txt").read_text()
    assert launch.events(run, "checkpoint")[-1]["kind"] == "final"
    assert json.loads((run / "status.json").read_text())["resume"].find("finetune") > 0
    # What a step trained on can be read back, and the report names the conversations.
    tokens = tokens_of_step(run, 4)
    assert tokens.windows.shape == (4, CONTEXT + 1)
    assert tokens.hash == launch.steps(run)[4]["batch_hash"]
    told = describe_tokens(run, tokens, as_text=True)
    assert re.search(r"--- sample 12: pairs_train row \d+\n<\|endoftext\|>### Instruction:\n", told)
    page = render(run)
    assert ", on pairs.jsonl, begun" in page
    assert "data_dir" not in page[: page.index("settings of the last start")]


def test_stopped_and_resumed_it_is_the_same_run(folder, tmp_path):
    finetune([*flags_of(folder, tmp_path, "cut"), "--stop_after_steps=2"])
    finetune([f"--checkpoint_dir={tmp_path}", "--run_name=cut", "--resume=latest"])
    whole, cut = folder / "runs" / "whole", tmp_path / "cut"
    assert launch.losses(cut) == launch.losses(whole)
    assert launch.parameter_hash(cut, 6) == launch.parameter_hash(whole, 6)
    (resume,) = launch.events(cut, "resume")
    assert (resume["level"], resume["verified_batches"]) == ("bit-identical", [2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modes", "lora"), [(("fsdp", "ddp"), ("--lora_r=2",)), (("zero1", "fsdp"), ())]
)
def test_what_each_process_holds_changes_nothing(modes, lora, folder, tmp_path):
    """Three steps in each mode, of two micro-batches a process, resumed in the other: as one process, files too."""
    finetune(flags_of(folder, tmp_path, "one", *lora))
    cut = ("--mini_batch_size=1", "--stop_after_steps=3")
    begin = flags_of(folder, tmp_path, "two", *lora, *cut)
    go_on = [f"--checkpoint_dir={tmp_path}", "--run_name=two", "--resume=latest"]
    recompute = "--activation_checkpointing=block"
    for flags, mode in ((begin, modes[0]), ([*go_on, recompute], modes[1])):
        done = launch.train_in_forks([*flags, f"--parallel={mode}"], world=2, program=FINETUNE)
        assert done.returncode == 0, done.stderr
    one, two = tmp_path / "one", tmp_path / "two"
    expected, found = launch.steps(one), launch.steps(two)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, event in expected.items():
        assert found[step]["loss"] == pytest.approx(event["loss"], rel=1e-5)
        assert found[step]["batch_hash"] == event["batch_hash"]
    losses = [[event["val_loss"] for event in launch.events(run, "eval")] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name in ("step_00000003/model", "step_00000003/optim", "step_00000006/model"):
        tensors, others = (load_file(run / f"{name}.safetensors") for run in (one, two))
        shapes = [{key: x.shape for key, x in one.items()} for one in (tensors, others)]
        assert shapes[0] == shapes[1]


def test_other_conversations_are_rejected_on_resume(folder, tmp_path):
    pairs = Path(shutil.copy(folder / "pairs.jsonl", tmp_path))
    flags = [f"--checkpoint_dir={tmp_path / 'runs'}", "--run_name=r"]
    begin = ("--stop_after_steps=2", f"--instructions={pairs}")
    finetune(flags_of(folder, tmp_path / "runs", "r", *begin))
    spaced = pairs.read_text().replace('": "', '":  "')  # other bytes, the same conversations
    pairs.write_text(spaced)
    moved = shutil.move(pairs, tmp_path / "moved.jsonl")
    finetune([*flags, "--resume=latest", f"--instructions={moved}", "--stop_after_steps=3"])
    packing = ("--packing=off", "--allow_change=packing", "--stop_after_steps=4")
    finetune([*flags, "--resume=latest", *packing])
    moved.write_text(spaced.replace("And?", "Then?"))
    with pytest.raises(ConfigError, match=r"data .*allow_change data"):
        finetune([*flags, "--resume=latest"])
    with pytest.raises(ConfigError, match=r"packing off -> on"):
        finetune([*flags, "--resume=latest", "--packing=on"])


def test_each_program_continues_its_own_runs(folder, tmp_path):
    flags = [f"--checkpoint_dir={folder / 'runs'}", "--run_name=whole", "--resume=latest"]
    with pytest.raises(ConfigError, match=r"run whole was begun by gpt2lab finetune; continue it"):
        pretrain(parse(flags))
    flags = ResumeCommand(str(folder / "runs" / "whole"), num_gpus=2)
    _, job = plan_continuation(flags, ["--max_steps=9", "--allow_change=max_steps"])
    assert "--nproc_per_node=2" in write(job, output="command")
    assert "src/finetune.py --resume latest" in write(job, output="command")


def test_a_run_that_no_longer_improves_stops_and_is_saved(folder, tmp_path):
    """At a rate of 3 the loss only grows: the best is the first evaluation, and two more are one too many."""
    more = ("--max_lr=3", "--warmup_steps=0", "--max_steps=20", "--eval_freq=2", "--grad_clip=0")
    finetune(flags_of(folder, tmp_path, "r", *more, "--early_stopping_patience=2"))
    evals = {event["step"]: event["val_loss"] for event in launch.events(tmp_path / "r", "eval")}
    best = min((n for n in evals if n), key=lambda n: evals[n])
    again = [f"--checkpoint_dir={tmp_path}", "--run_name=r", "--resume=latest"]
    finetune(again)
    stops = [(stop["reason"], stop["step"]) for stop in launch.events(tmp_path / "r", "stop")]
    assert stops == 2 * [("early stopping", best + 4)]
    assert max(evals) == best + 4 < 20
    assert json.loads((tmp_path / "r" / "status.json").read_text())["state"] == "stopped"
    assert (tmp_path / "r" / f"step_{best + 4:08d}").is_dir()
    # No evaluation is due after this step, so none decides that the run is over.
    finetune([*again, "--eval_freq=4", "--early_stopping_patience=1"])
    assert launch.events(tmp_path / "r", "step")[-1]["step"] > best + 4


def test_rates_are_parts_of_the_presets_and_adapters_are_adamws():
    def begun(*more: str) -> dict[str, Any]:
        command = parse(["--init_from=x", "--instructions=demo", *more], "finetune")
        return to_flat(FINETUNING.defaults(command, command.over(preset("modern-micro"))))

    def optim(settings: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(settings[name] for name in ("optimizer", "max_lr", "muon_lr"))

    assert optim(to_flat(preset("modern-micro"))) == ("normuon", 3.2e-2, 1e-2)
    assert optim(begun()) == ("normuon", 3.2e-3, 1e-3)
    assert optim(begun("--max_lr=1e-3", "--muon_lr=2e-3")) == ("normuon", 1e-3, 2e-3)
    assert optim(begun("--lora_r=4"))[:2] == ("adamw", 5e-3)  # half of muon_lr: of the matrices
    with pytest.raises(ConfigError, match="--optimizer muon: is for the matrices of the blocks"):
        begun("--lora_r=4", "--optimizer=muon")


@pytest.mark.parametrize(
    "change",
    [
        *("--instructions=none.jsonl", "--init_from=runs/none/x", "--n_layer=2", "--lora_r=-1"),
        *("--lora_targets=c_attn", "--val_fraction=1", "--data_dir=data", "--fit_schedule"),
        *("--mini_batch_size=auto", "--lora_r=2 --lora_targets=c_attn,q_proj"),
        *("--init_from=None", "--instructions=None"),
    ],
)
def test_settings_that_cannot_work_are_one_line(change, folder, tmp_path, wording, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = flags_of(folder, tmp_path / "runs", "r")
    names = {flag.partition("=")[0] for flag in change.split()}
    kept = [flag for flag in flags if flag.partition("=")[0] not in names]
    typed = [flag for flag in change.split() if not flag.endswith("=None")]
    with pytest.raises(GPT2LabError, check=wording):
        finetune([*kept, *typed])
    assert not (tmp_path / "runs").exists()


def test_the_command_lists_plans_and_rejects(folder, tmp_path):
    flags = flags_of(folder, tmp_path / "runs", "r", "--dry_run")
    planned = launch.worked(launch.call(FINETUNE, *flags))
    assert f"{folder / 'pairs.jsonl'}, 22 conversations in" in planned.stdout
    listed = launch.call(FINETUNE, "--list_checkpoints", f"--checkpoint_dir={folder / 'runs'}")
    assert "whole" in listed.stdout
    rejected = launch.call(FINETUNE, *flags, "--lora=8")
    assert rejected == (2, "", "error: unknown flag --lora: did you mean --lora_r?\n")
    theirs = launch.call(launch.TRAIN, "--lora_r=8")
    assert theirs.stderr == "error: unknown flag --lora_r: it belongs to gpt2lab finetune\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("model", "small"), [("gpt2", False), ("gpt2-nano", True)])
def test_help_shows_the_defaults_of_fine_tuning(model, small):
    command = parse([f"--model={model}", "--init_from=x", "--instructions=demo"], "finetune")
    preset = command.config
    found = to_flat(FINETUNING.defaults(command, preset))
    others = {name for name, value in to_flat(preset).items() if found[name] != value}
    assert others <= set(TUNING_DEFAULTS)
    for name, text in TUNING_DEFAULTS.items():
        if text.isdecimal() or name in ("shuffle", "epoch_checkpoints"):
            value = found[name]
            assert (f"{value:g}" if isinstance(value, float) else str(value)) == text
    assert found["total_batch_size"] == (4 if small else 16) * preset.model.context_length
    assert found["max_lr"] == pytest.approx(preset.optim.max_lr / 10)
    assert found["sample_prompt"] == as_prompt("Who are you?")


def test_preflight_tries_a_step_on_the_answers(folder, tmp_path, capsys, monkeypatch):
    flags = [*flags_of(folder, tmp_path / "runs", "r", "--lora_r=2"), "--preflight", "--json"]
    monkeypatch.setattr(sys, "argv", ["src/finetune.py", *flags])
    assert preflight(parse(flags, "finetune"), recipe=FINETUNING, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    details = {check["name"]: check["detail"] for check in told["checks"]}
    assert "22 conversations in" in details["data"]
    (loss,) = re.findall(r"loss (\d+\.\d+)", details["step"])
    assert float(loss) == pytest.approx(math.log(NUM_TOKENS), rel=0.02), "of a random model"
    assert "src/finetune.py --init_from" in told["command"]
    assert not (tmp_path / "runs").exists()


def test_a_model_of_another_vocabulary_is_rejected(tmp_path, tiny_flags):
    pretrain(parse([*tiny_flags, "--max_steps=1"]))
    run = tmp_path / "runs" / "tiny"
    flags = [f"--init_from={run}", "--instructions=demo", f"--checkpoint_dir={tmp_path / 'new'}"]
    with pytest.raises(ConfigError, match="vocab_size 256 is below GPT-2's 50257"):
        finetune(flags)
    assert not (tmp_path / "new").exists()

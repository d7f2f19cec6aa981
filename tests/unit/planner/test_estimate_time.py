"""What scripts/estimate_time.py prints, writes and rejects, with and without a run to look at."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import gpt2lab
from gpt2lab.commands import estimate_time
from gpt2lab.commands.entry import run
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import GPT2LabError
from gpt2lab.planner import forecast, memory, remaining
from gpt2lab.planner.reports import KEYS
from gpt2lab.runs import history
from launch import SCRIPTS, Done, call, python, rejected, worked
from tiny import TINY, TRAIN_SHARDS, edit_json, write_shards


def ask(tmp_path: Path, *argv: str) -> Done:
    return call("estimate_time.py", f"--checkpoint_dir={tmp_path / 'runs'}", *argv)


def test_without_run_or_gpu_the_answer_is_wide_and_imports_nothing_heavy(tmp_path):
    program = ("-X", "importtime", SCRIPTS / "estimate_time.py")
    answer = python(*program, f"--checkpoint_dir={tmp_path}")
    assert answer.returncode == 0, answer.stderr[-500:]
    imported = set(re.findall(r"^import time:.*\| +(\w+)[\w.]*$", answer.stderr, re.MULTILINE))
    assert "argparse" in imported  # the list is really what was imported
    assert not imported & {"torch", "scipy", "matplotlib", "pyarrow", "datasets", "transformers"}
    if "CPU" in answer.stdout:
        assert ("not calibrated" in answer.stdout, "--measure" in answer.stdout) == (True, True)


@pytest.mark.parametrize(
    "flags",
    [
        *(["--gpu=H100", "--compare=models", "--deadline=12h"], ["--gpu=H100", "--compare=gpus"]),
        ["--gpu=H100", "--compare=profiles", "--deadline=2d"],
        ["--num_samples=20000", "--avg_tokens_per_sample=500", "--total_batch_size=65536"],
        *(["--accuracy"], []),
    ],
)
def test_json_is_one_object_with_every_key_in_every_mode(tmp_path, capsys, flags):
    (tmp_path / "runs").mkdir()
    flags = [*flags, f"--checkpoint_dir={tmp_path / 'runs'}", "--json"]
    assert estimate_time.main(flags) in (0, 3)
    out, err = capsys.readouterr()
    assert (err, out.count("\n")) == ("", 1)
    assert set(KEYS) <= set(json.loads(out))


ANSWERS = [{"list_gpus": True}, {"accuracy": True}, {"run_name": "r"}]
ANSWERS += [{"gpu": "H100", "compare": "gpus"}]


@pytest.mark.parametrize("flags", ANSWERS, ids=str)
def test_the_api_answers_as_the_command_does(a_run, tmp_path, capsys, flags):
    flags = {**flags, "checkpoint_dir": a_run.parent}
    report = tmp_path / "report.json"
    found = gpt2lab.estimate(**flags, report=str(report))
    assert (capsys.readouterr().out, set(json.loads(report.read_text()))) == ("", set(found))
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    estimate_time.main([*words, "--json"])
    printed = json.loads(capsys.readouterr().out)
    kinds, theirs = ({n: type(value) for n, value in one.items()} for one in (found, printed))
    assert (kinds, found.get("comparison", {})) == (theirs, printed.get("comparison", {}))


def test_the_report_file_holds_the_keys_of_the_window_planner(tmp_path):
    report = tmp_path / "optimization_report.json"
    flags = ["--gpu=H100", "--gpus=4", "--tokens=2B", "--deadline=12h", f"--report={report}"]
    answer = ask(tmp_path, *flags)
    assert (answer.returncode, answer.stderr) == (0, "")
    found = json.loads(report.read_text())
    assert (found["schema"], found["actual"]) == ("gpt2-estimate/1", None)
    assert (found["max_training_hours"], found["estimate"]["verdict"]) == (12.0, "fits")
    assert found["estimate"]["fits_in_window"] is True
    assert {"batch_size", "gradient_accumulation_steps", "max_length"} <= set(found["profile"])
    assert found["model"]["parameters"] == 124_475_904
    hours = found["estimate"]["estimated_hours"]
    assert sum(found["breakdown"].values()) == pytest.approx(3600 * hours)


def test_a_short_run_has_its_steps_for_milestones_and_what_is_said_to_fit_a_window_fits_it(capsys):
    estimate_time.main(["--gpu=H100", "--steps=2", "--json"])
    found = json.loads(capsys.readouterr().out)["milestones"]
    assert [one["step"] for one in found] == [1, 2]
    window = ["--gpu=RTX-4090", "--deadline=9h", "--tokens"]
    assert estimate_time.main([*window, "100B"]) == 3
    length = re.search(r"--tokens (\S+)", capsys.readouterr().out)
    assert estimate_time.main([*window, length[1]]) == 0


REFUSALS = {
    2: [
        *("--tokens=-5", "--tokens=many", "--tokens=1e30", "--n_layer=99999999999", "--n_layer=0"),
        *("--max_steps=5", "--tokens=1B --steps=5", "--gpu=H100 --tokens=1000", "--epochs=2"),
        *("--num_samples=5", "--gpu=H100 --deadline='2020-01-01 00:00'"),
        *("--gpu=H100 --deadline=soon", "--gpu=H100 --deadline=20m", "--gpu=H100 --profile=quick"),
        *("--gpu=H100 --gpus=16 --nodes=2 --interconnect=wifi", "--gpu=H100 --gpus=16 --nodes=2"),
        *("--gpu=H100 --gpus=8 --nodes=3", "--gpu=H100 --gpus=7", "--gpu=V100-PCIe"),
        *("--run_name=nobody", "--gpu=T4 --dtype=bf16"),
        *("--measure --gpu=H100", "--gpu=H100 --parallel=fsdp"),
        *("--gpu=H100 --gpus=8 --fsdp_offload", "--gpu=H100 --gpus=8 --fsdp_param_dtype=bf16"),
        "--gpu=H100 --gpus=8 --parallel=fsdp --fsdp_param_dtype=bf16 --dtype=fp32",
        *("--gpu=H100 --price=0", "--gpu=H100 --margin=2h", "--seconds=5", "--nodes=2"),
        *("--scaling=1,2", "--compare=gpus --start=soon", "--compare=models --explain"),
        *("--list_gpus --gpu=H100", "--list_gpus --accuracy", "--run_name=a --price=2"),
        *("--find_batch_size --mini_batch_size=4", "--gpu=H100 --steps=1e17"),
        "--gpu=H100 --num_samples=1e10 --avg_tokens_per_sample=1e300",
        *("--gpu=H100 --scaling=0,2", "--gpu=H100 --compare=models --data_dir=no"),
        "--gpu=H100 --report=/nonexistent/x.json",
    ],
    3: [
        "--gpu=RTX-4090 --tokens=100B --deadline=1h",
        "--gpu=RTX-4090 --model=gpt2-xl",
        "--gpu=RTX-4090 --mini_batch_size=64",
    ],
    4: ["--gpu=H1000", "--gpu=XYZ", "--gpu=", "--gpu=H100 --dtype=fp32"],
}


@pytest.mark.parametrize(
    ("code", "words"), [(code, words) for code, some in REFUSALS.items() for words in some]
)
def test_what_cannot_be_is_one_line_and_an_exit_code(
    tmp_path, capsys, monkeypatch, code, words, wording
):
    flags = [*shlex.split(words), f"--checkpoint_dir={tmp_path / 'runs'}"]
    monkeypatch.setattr(sys, "argv", ["estimate_time.py", *flags])
    assert run(estimate_time.main) == code
    out, err = capsys.readouterr()
    if code in (2, 4):
        assert out == ""
        wording(err)
    else:
        assert err == ""
        assert "NOT FIT" in out
        assert "to make it fit" in out or "GiB" in out
    assert not (tmp_path / "runs").exists()


def test_a_price_has_one_source(capsys, tmp_path):
    report = tmp_path / "r.json"
    for flags, row in (
        ([], r"\([\w-]+, 20\d\d-\d\d; --price changes it\)"),
        (["--price=2"], r"at \$2 per GPU-hour \(--price\)"),
    ):
        estimate_time.main(["--gpu=H100", *flags, f"--report={report}"])
        cost = json.loads(report.read_text())["cost"]
        assert cost["kwh"] == pytest.approx(0.7 * cost["usd"] / cost["price_per_gpu_hour"])  # 700 W
        assert re.search(f"^cost .*{row}", capsys.readouterr().out, re.MULTILINE)


def test_a_model_too_large_names_a_few_cards_that_it_fits_or_never_finishes(capsys):
    shape = ["--n_layer=10000", "--n_embd=1000000", "--n_head=10000", "--tokens=1e17"]
    estimate_time.main(["--gpu=L4", *shape])
    assert "finishes never" in capsys.readouterr().out
    estimate_time.main(["--gpu=RTX-4090", "--model=gpt2-xl"])
    (line,) = re.findall(r"^.*one sequence at a time needs.*$", capsys.readouterr().out, re.M)
    assert re.search(r"fits (\S+, ){3}\S+ and \d+ more;", line)


def test_tables_keep_the_cards_of_a_node_and_a_typed_micro_batch():
    """On one node the step of 32 cards would take a twentieth of that of 16 on two."""
    two = {"gpu": "H100", "gpus": 16, "nodes": 2, "interconnect": "eth10", "tokens": "1B"}
    rows = gpt2lab.estimate(**two, model="gpt2", scaling="16,32")["scaling"]
    assert rows[1]["hours"] > 0.5 * rows[0]["hours"]
    small = {"gpu": "RTX-4090", "mini_batch_size": 64, "tokens": "1B"}
    found = gpt2lab.estimate(**small, compare="models", deadline="100h")["comparison"]["rows"]
    assert [row["fits_memory"] for row in found] == [False] * 4


def test_memory_check_rejects_what_it_does_not_answer(tmp_path):
    words = ["--gpu=H100", "--deadline=12h", f"--report={tmp_path / 'r.json'}", "--explain"]
    error = rejected(call("doctor", *words))
    assert all(f"unknown flag --{name}" in error for name in ("deadline", "report", "explain"))
    rejected(call("doctor", "--nodes=2"))
    assert call("doctor", "--gpu=H100", "--price=3", "--json").returncode == 0


@pytest.mark.parametrize("typed", ["--model=modern-small", "--optimizer=muon", "--vocab_size=384"])
def test_the_loss_of_what_is_not_gpt2_is_not_predicted_as_gpt2s(tmp_path, typed):
    flags = ["--gpu=H100", "--tokens=10B"]
    assert json.loads(ask(tmp_path, *flags, typed, "--json").stdout)["loss"] is None
    (line,) = [x for x in ask(tmp_path, *flags, typed).stdout.splitlines() if x[:4] == "loss"]
    assert line.split()[1] == "n/a"
    why = "GPT-2 with AdamW; for that it predicts 3.18 ... 3.38"
    assert ("GPT-2's 50,257 ids;" if "vocab" in typed else why) in line
    known = json.loads(ask(tmp_path, *flags, "--model=gpt2", "--json").stdout)["loss"]
    assert known["value"] == pytest.approx(3.28, abs=0.005)


def test_settings_that_make_no_sense_together_are_named(tmp_path):
    answer = worked(ask(tmp_path, "--gpu=H100", "--steps=100", "--warmup_steps=715"))
    assert "warm-up of 715 steps in a run of 100" in answer.stdout
    assert "eval_freq 250 is longer than the run" in answer.stdout
    assert "of the time; a smaller --val_tokens makes it less" in answer.stdout
    answer = ask(tmp_path, "--gpu=H100", "--steps=20000", "--eval_freq=10")
    assert "of the time; --eval_freq 350 makes it 2 %" in answer.stdout


def test_the_length_of_a_run_in_epochs_is_counted_in_the_data(tmp_path):
    data = write_shards(tmp_path / "d", train=TRAIN_SHARDS, val=(650,))
    shape = [flag for flag in TINY if not flag.startswith(("--d", "--val_tokens"))]
    flags = [*shape, "--gpu=H100", "--epochs=3", f"--data_dir={data}"]
    answer = ask(tmp_path, *flags, "--json")
    found = json.loads(answer.stdout)
    windows = sum((size - 1) // 16 for size in TRAIN_SHARDS)
    assert found["estimate"]["total_steps"] == int(3 * windows * 16) // 128
    assert found["dataset_info"]["epochs"] == pytest.approx(3, abs=0.1)
    assert found["breakdown"]["eval_s"] < 1, "there are 650 validation tokens, not 10M"


@pytest.fixture
def a_run(tmp_path) -> Path:
    """Return the folder of a run that stopped half-way, with an estimate."""
    run_dir = tmp_path / "runs" / "r"
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps(to_flat(Config())))
    begun = {"max_steps": 1000, "tokens_per_step": 524_288, "world_size": 1}
    lines: list[dict[str, object]] = [{"event": "begin", "step": 0, **begun}]
    for step in range(1, 501):
        times = {"step_seconds": 2.0, "elapsed_seconds": 2.0 * step}
        lines.append({"event": "step", "step": step, **times})
        if step % 250 == 0:
            measured = {"val_loss": 3.0, "val_tokens": 1, "seconds": 10.0}
            lines.append({"event": "eval", "step": step} | measured)
    text = "".join(json.dumps({"time": 1.7e9, "attempt": 1, **line}) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text)
    return run_dir


def test_the_newest_run_is_projected_with_its_events_and_milestones(a_run, capsys):
    left = remaining.estimate_remaining(a_run)
    assert left.seconds.value == pytest.approx(500 * 2.0 + 2 * 10.0)
    assert left.seconds.low <= 1020 <= left.seconds.high
    assert [step for step, _ in left.milestones] == [750, 1000]
    assert estimate_time.main([f"--checkpoint_dir={a_run.parent}"]) == 0
    shown = capsys.readouterr().out
    assert ("500 of 1,000 steps" in shown, "75%" in shown) == (True, True)
    estimate_time.main([f"--checkpoint_dir={a_run.parent}", "--json"])
    assert set(KEYS) <= set(json.loads(capsys.readouterr().out))
    log = (a_run / "metrics.jsonl").read_text().replace('"max_steps": 1000', '"max_steps": 500')
    (a_run / "metrics.jsonl").write_text(log)
    text = remaining.describe_remaining(remaining.estimate_remaining(a_run), 0.0)
    assert "what follows the last step" in text, "no `done`: the last evaluations are missing"


def test_milestones_count_the_tokens_that_earlier_starts_trained_with_another_batch(a_run):
    log = a_run / "metrics.jsonl"
    text = log.read_text()
    log.write_text(text.replace('"step": 500, "step_s', '"step": 500, "tokens": 7, "step_s'))
    found = remaining.remaining_as_json(remaining.estimate_remaining(a_run), 0.0)
    assert found["milestones"][0]["tokens"] == 7 + 250 * 524_288
    assert found["dataset_info"]["training_tokens"] == 7 + 500 * 524_288
    begun = log.read_text().splitlines()[0].replace('"step": 0', '"step": 400')
    log.write_text(f"{begun}\n")  # a branch before its first step
    assert remaining.estimate_remaining(a_run).step == 400
    log.write_text(text.replace('"step": 0', '"step": 400', 1))
    said = remaining.describe_remaining(remaining.estimate_remaining(a_run), 0.0)
    assert "500 of 1,000 steps, 100 of them in " in said


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"parallel": "zero1"}, {"fsdp_offload": True}),
        {"parallel": "fsdp", "activation_checkpointing": "block"},
        {"parallel": "fsdp", "fsdp_param_dtype": "bf16"},
        {"optimizer": "muon", "positions": "rotary"},
        {"instructions": "demo", "lora_r": 8},
    ],
    ids=lambda settings: "+".join(map(str, settings.values())),
)
def test_a_runs_memory_is_that_of_how_it_shares_and_what_it_recomputes(a_run, capsys, settings):
    """Null where no formula knows it."""
    edit_json(a_run / "config.json", **settings)
    environment = {"world_size": 4, "mini_batch_size": 16, "dtype": "bf16"}
    (a_run / "run.json").write_text(json.dumps({"environment": environment}))
    estimate_time.main([f"--checkpoint_dir={a_run.parent}", "--json"])
    found = json.loads(capsys.readouterr().out)["memory"]
    if "fsdp_offload" in settings:
        assert found is None
        return
    config = history.read_config(a_run)
    how = {"micro_batch": 16, "accumulation": 8, "dtype": "bf16", "world_size": 4}
    expected = memory.StepMemory(config, **how).peak()
    assert found["total"] == expected.tensors + found["context"] > expected.tensors
    assert found["peak_at"] == expected.peak_at


def test_logs_that_cannot_be_right_are_rejected_in_one_line(a_run):
    metrics = a_run / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text + '{"event": "step", "st')  # torn: the writer was killed
    assert remaining.estimate_remaining(a_run).step == 500
    for untimed in ("0.0", "null"):
        metrics.write_text(text.replace('"step_seconds": 2.0', f'"step_seconds": {untimed}'))
        assert remaining.estimate_remaining(a_run).throughput is None
    endless = re.sub(r'"max_steps": \d+', '"max_steps": null', text)
    for wrong in ("", text.replace("524288", "1024"), endless, "no json\n"):
        metrics.write_text(wrong)
        with pytest.raises(GPT2LabError, match=re.escape(str(a_run))) as caught:
            remaining.estimate_remaining(a_run)
        assert "\n" not in str(caught.value)


def test_a_forecast_is_scored(a_run):
    predicted = {"estimated_hours": 0.3, "low_hours": 0.2, "high_hours": 0.4, "total_steps": 500}
    speed = {"source": "calibrated", "value": 3.0, "low": 2.0, "high": 4.0}
    document = {"estimate": predicted, "throughput": speed, "memory": None}
    (a_run / forecast.FILE).write_text(json.dumps(document))
    metrics = a_run / "metrics.jsonl"
    seen = '"peak_memory_bytes": 5, "step_seconds"'
    metrics.write_text(metrics.read_text().replace('"step_seconds"', seen))
    actual = forecast.complete(a_run, history.read_log(a_run))
    assert actual["hours"] == pytest.approx((1000 + 10) / 3600, rel=0.01)
    assert actual["time_accuracy"] == pytest.approx(100 * 0.3 * 3600 / 1010, rel=0.01)
    assert actual["inside_interval"] is True
    assert "100% inside" in forecast.describe_history(a_run.parent)[1]
    document["estimate"]["total_steps"] = 400  # its length was changed since
    (a_run / forecast.FILE).write_text(json.dumps(document))
    changed = forecast.complete(a_run, history.read_log(a_run))
    assert changed["time_accuracy"] is changed["inside_interval"] is None
    text = metrics.read_text()
    metrics.write_text(text.replace('"event": "begin", "step": 0', '"event": "begin", "step": 100'))
    assert forecast.complete(a_run, history.read_log(a_run))["inside_interval"], "a branch's steps"
    begun = {"event": "begin", "step": 500, "time": 1.7e9, "attempt": 2, "max_steps": 500}
    begun |= {"world_size": 1, "tokens_per_step": 1024}
    with open(metrics, "a") as file:  # another batch from here on
        file.write(json.dumps(begun) + "\n")
    assert forecast.complete(a_run, history.read_log(a_run))["time_accuracy"] is None
    for accuracy in (None, 0, "x"):  # and edited
        edit_json(a_run / forecast.FILE, actual=changed | {"time_accuracy": accuracy})
        assert "no finished run" in forecast.describe_history(a_run.parent)[1]

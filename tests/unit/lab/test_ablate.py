"""`gpt2lab ablate`: what it rejects, what it reads off the curves, and that nothing complete is trained again."""

import json
import re
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import launch
from corpora import TEXTS, run_prepare, write_jsonl
from gpt2lab.commands import ablate, resume_command
from gpt2lab.commands.ablate import cross, read_requests, read_settings, take_grid
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import CheckError, ConfigError, DataError, GPT2LabError, SavedInterrupt
from gpt2lab.lab import ablation, seed_runs
from gpt2lab.lab.ablation import Curve, TableRow, compare, reach, read_curve, write_markdown
from gpt2lab.lab.seed_runs import Machine, SeedRun, run_all
from gpt2lab.lab.stats import OverSeeds, over_seeds
from gpt2lab.report.plots import View, draw_table
from gpt2lab.runs import history
from gpt2lab.tokenizers.plain import BYTES
from tiny import TINY, parse, pretrain

FALLING = Curve((0, 200, 300), (0.0, 2.0, 3.0), (6.0, 4.0, 3.5))


def plan_runs(
    settings: dict[str, list[str]], shared: list[str], seeds: tuple[int, ...], *, out: Path
) -> list[SeedRun]:
    return ablation.Ablation(read_requests(settings, shared), out)._plan(seeds)


def exactly(value: float) -> OverSeeds:
    """Return the mean of two seeds that agree."""
    return over_seeds([value, value])


def test_settings_are_read_in_order_with_their_flags(tmp_path: Path) -> None:
    path = tmp_path / "s.txt"
    path.write_text("# comment\nplain:\n\nhot: --max_lr 0.01 --sample_prompt 'a b'\n")
    settings = read_settings(path)
    assert list(settings) == ["plain", "hot"]
    assert settings == {"plain": [], "hot": ["--max_lr", "0.01", "--sample_prompt", "a b"]}
    path.write_text(path.read_text(), "utf-8-sig")
    assert read_settings(path) == settings
    with pytest.raises(ConfigError, match="over 1,048,576 characters"):
        read_settings(Path("/dev/zero"))


@pytest.mark.parametrize(
    "text", ["plain\nb: x", "a: x\nb/c: y", "a: x\na: y", "a: 'x\nb: y", "a: x", None]
)
def test_a_settings_file_that_means_nothing_is_rejected(tmp_path: Path, text, wording) -> None:
    path = tmp_path / "s.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ConfigError, DataError), check=wording):
        read_settings(path)


def test_a_loss_is_reached_between_the_evaluations_around_it() -> None:
    places = {5.0: (100.0, 1.0), 4.0: (200.0, 2.0), 3.75: (250.0, 2.5), 9.0: (0.0, 0.0)}
    for target, place in places.items():
        assert reach(FALLING, target) == pytest.approx(place)
    assert reach(FALLING, 3.4) is None


def test_ratios_are_to_the_baseline_with_the_same_seed() -> None:
    """The second seed's baseline ends at 4.0, which its rival reaches after 100 of 300 tokens."""
    slow = Curve((100, 200, 300), (2.0, 4.0, 6.0), (6.0, 5.0, 4.0))
    fast = Curve((0, 100, 200), (0.0, 1.5, 3.0), (6.0, 4.0, 3.0))
    half = Curve((0, 100, 200), (0.0, 1.5, 3.0), (6.0, 4.5, 3.0))
    base, rival = compare({"a": [FALLING, slow], "b": [half, fast]}, target=None)
    assert (base.tokens_ratio, base.tokens_to_loss) == (exactly(1.0), exactly(300.0))
    first, second = (100 + 100 * (1.0 / 1.5)) / 300, 100 / 300
    assert rival.tokens_ratio.mean == pytest.approx((first + second) / 2)
    assert rival.tokens_ratio.se == pytest.approx((first - second) / 2)
    assert rival.seconds_ratio.mean == pytest.approx((2.5 / 3.0 + 1.5 / 6.0) / 2)
    assert (rival.tokens, rival.reached) == (200, 2)
    assert rival.loss_difference is None
    (why,) = ablation.unequal_sentences([base, rival])
    assert why == "b ends after 200 tokens and a after 300, so their last losses are not compared."
    assert base.loss_difference == exactly(0.0)
    # One that rose again reached its last loss before, and so did the same curve.
    rising = Curve((100, 200, 300), (1.0, 2.0, 3.0), (6.0, 3.0, 4.0))
    base, rival = compare({"a": [rising] * 2, "b": [rising] * 2}, target=None)
    assert base.tokens_ratio == rival.tokens_ratio == exactly(1.0)
    # A loss that a seed does not reach has no mean.
    flat = Curve((0, 50, 100), (0.0, 0.5, 1.0), (9.0, 9.0, 9.0))
    _, rival = compare({"a": [FALLING, FALLING], "b": [FALLING, flat]}, target=3.6)
    assert (rival.tokens_to_loss, rival.tokens_ratio, rival.reached) == (None, None, 1)
    assert rival.loss == over_seeds([3.5, 9.0])
    base, rival = compare({"a": [FALLING] * 2, "b": [FALLING] * 2}, target=9.0)  # from the start
    assert (rival.tokens_to_loss, rival.tokens_ratio, rival.reached) == (exactly(0.0), None, 2)


def test_losses_at_equal_tokens_are_compared_seed_by_seed() -> None:
    """Differences -0.5, -0.75, -0.4: mean -0.55, sd 0.180278, and t(2 df) at 97.5 % is 4.302653."""

    def ends(loss: float) -> Curve:
        return Curve((100, 200), (1.0, 2.0), (9.0, loss))

    base = [ends(3.0), ends(4.0), ends(5.0)]
    rows = compare({"a": base, "b": [ends(2.5), ends(3.25), ends(4.6)]}, target=None)
    found = rows[1].loss_difference
    assert (rows[1].tokens_to_loss, rows[1].reached) == (None, None)  # between both ends
    assert "losses at its start and end alone" in write_markdown(rows, target=None)
    assert found.mean == pytest.approx(-0.55)
    assert found.se == pytest.approx(0.180278 / 3**0.5, rel=1e-5)
    assert found.half_width == pytest.approx(4.302653 * 0.180278 / 3**0.5, rel=1e-5)


def test_a_setting_that_diverged_has_no_number() -> None:
    """Its other seeds are no fair sample: it chose them. A baseline that diverged leaves nothing to compare."""
    curves = {"a": [FALLING] * 2, "b": [FALLING, None], "c": [FALLING] * 2}
    base, rival, other = compare(curves, target=None)
    assert rival == TableRow("b", 2, diverged=1)
    assert (base.reached, other.reached, other.loss_difference) == (2, 2, exactly(0.0))
    written = write_markdown([base, rival, other], target=None)
    assert "| b | 2 | n/a | diverged in 1 of 2 seeds | n/a |" in written
    none, left = compare({"a": [None, FALLING], "c": [FALLING] * 2}, target=None)
    assert none == TableRow("a", 2, diverged=1)
    assert (left.loss, left.tokens) == (exactly(3.5), 300)
    assert (left.loss_difference, left.tokens_to_loss, left.reached) == (None, None, None)
    why = "a diverged in 1 of 2 seeds, so nothing is compared with it."
    assert ablation.diverged_sentences([none, left]) == {"a": why}
    _, reached = compare({"a": [None, FALLING], "c": [FALLING] * 2}, target=3.5)
    assert (reached.tokens_to_loss, reached.tokens_ratio) == (exactly(300.0), None)


@pytest.fixture
def shared(tiny_data: Path) -> list[str]:
    changed = ("--n_layer=1", "--n_embd=16", "--eval_freq=2", "--max_tokens=768")
    return [*TINY, *changed, f"--data_dir={tiny_data}"]


def test_finished_runs_are_read_and_unfinished_ones_go_on(shared, started, tmp_path, capsys):
    settings = {"cold": ["--max_lr=0.0001"], "hot": ["--max_lr=0.01", "--optimizer=muon"]}
    runs = plan_runs(settings, shared, seeds=(1, 2), out=tmp_path)
    runs[1].write_settings()
    pretrain(parse([*runs[1].trainer_words(), "--stop_after_steps=3"]))  # a start cut short
    run_all(runs)
    assert started == ["cold_seed1", "hot_seed1", "cold_seed2", "hot_seed2"]
    resumes = launch.events(tmp_path / "hot_seed1", "resume")
    assert [event["from_step"] for event in resumes] == [3]

    run_all(plan_runs(settings, shared, seeds=(1, 2), out=tmp_path))
    assert len(started) == 4
    assert capsys.readouterr().err.endswith("[4/4] hot_seed2: complete\n")
    markdown, as_json = ablation.Ablation({}, tmp_path).write(runs)
    assert json.loads((tmp_path / "ablation.json").read_text()) == json.loads(json.dumps(as_json))
    assert (tmp_path / "ablation.md").read_text() == markdown + "\n"
    cold, hot = as_json["settings"]
    assert (cold["setting"], cold["tokens"], cold["reached"]) == ("cold", 768, 2)
    assert hot["tokens_ratio"]["value"] < 1
    logged = [e["val_loss"] for e in launch.events(tmp_path / "cold_seed2", "eval")]
    assert list(cold["curves"][1]["losses"]) == logged
    assert cold["curves"][1]["tokens"] == (0, 256, 512, 768)
    assert markdown.splitlines()[2].startswith("| cold | 2 | 768 | ")

    settings["hot"][0] = "--max_lr=0.02"
    with pytest.raises(ConfigError, match=r"was run with max_lr 0.01, not 0.02"):
        plan_runs(settings, shared, seeds=(1,), out=tmp_path)
    settings["hot"][0] = "--max_lr=0.01"
    for name, had, other in (("val_tokens", 320, 160), ("eval_freq", 2, 1)):
        with pytest.raises(ConfigError, match=f"cold_seed1 was run with {name} {had}, not {other}"):
            plan_runs(settings, [*shared, f"--{name}={other}"], seeds=(1,), out=tmp_path)
    record = tmp_path / "cold_seed1" / "run.json"
    record.write_text(record.read_text().replace('"data_fingerprint": "', '"data_fingerprint": "0'))
    with pytest.raises(DataError, match="cold_seed1 was trained on other data than its data"):
        plan_runs(settings, shared, seeds=(1,), out=tmp_path)


def test_a_job_array_trains_what_an_ablation_has_left(shared, started, tmp_path, capsys):
    """Each task has the words of its run, also those that no settings file holds."""
    runs = plan_runs({"a": [], "b": ["--stop_at=2099-01-01"]}, shared, seeds=(1,), out=tmp_path)
    words = [str(tmp_path), "--output=slurm", "--array", "--gpus=0"]
    with pytest.raises(ConfigError, match="was started once"):
        resume_command.main(words)
    run_all(runs[:1])
    plan_runs({"b": ["--stop_after_steps=3"]}, shared, (1,), out=tmp_path)[0].write_settings()
    with pytest.raises(ConfigError, match="b_seed1 stops early"):
        resume_command.main(words)
    runs[1].write_settings()
    capsys.readouterr()
    resume_command.main(words)
    script = capsys.readouterr().out
    assert ("#SBATCH --array=0-0\n" in script, "--gpus" in script) == (True, False)
    (line,) = re.findall(r"^0\) set -- (.*) ;;$", script, re.M)
    assert shlex.split(line) == runs[1].trainer_words()
    for task in ({"SLURM_ARRAY_TASK_ID": "1"}, {}):  # of another array, and started by hand
        done = subprocess.run(["bash", "-c", script], env=task, **launch.TO_ITS_END)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"error: no task (1|none), only 0 to 0; sbatch sets it\n", done.stderr)
    pretrain(parse([*shlex.split(line)[:2], "--resume=auto"]))
    with pytest.raises(ConfigError, match="all 2 runs that were planned are complete"):
        resume_command.main(words)
    with pytest.raises(ConfigError, match="--array goes with"):
        resume_command.main([*words, "--max_lr=1"])


def test_vocabulary_and_rate_follow_data_and_length(shared, started, tmp_path, capsys):
    write_jsonl(tmp_path / "text" / "a.jsonl", TEXTS * 20)
    run_prepare(tmp_path / "text", tmp_path / "data", tokenizer=BYTES, val_tokens=500)
    flags = [flag for flag in shared if not flag.startswith(("--vocab_size", "--data_dir"))]
    flags += [f"--data_dir={tmp_path / 'data'}", "--model=gpt2-micro"]
    settings = {"a": [], "b": ["--max_lr=0.01"]}
    run_all(plan_runs(settings, flags, seeds=(1,), out=tmp_path / "out"))
    run_all(plan_runs(settings, flags, seeds=(1,), out=tmp_path / "out"))
    assert len(started) == 2
    assert capsys.readouterr().err.endswith("[2/2] b_seed1: complete\n")
    assert history.read_config(tmp_path / "out" / "a_seed1").optim.max_lr == 1.1e-4


def test_a_run_that_is_killed_or_fails_ends_the_ablation(shared, tmp_path, monkeypatch, request):
    """The last words of one that is killed are no reason, such as `loading PyTorch: 4 s so far`."""
    runs = plan_runs({"a": [], "b": ["--max_lr=0.01"]}, shared, seeds=(1,), out=tmp_path)
    deadly, start = Mock(wraps=Machine()), Machine().start  # its memory is too small, say
    deadly.start = lambda *job: (trainer := start(*job), trainer.kill())[0]
    with pytest.raises(CheckError, match=r"exit code -9: Killed; start again to continue$"):
        run_all(runs, machine=deadly)
    started = request.getfixturevalue("started")
    full = GPT2LabError("disk is full")
    full.exit_code = 75
    monkeypatch.setattr("gpt2lab.training.steps.train_step", Mock(side_effect=full))
    with pytest.raises(CheckError, match="exit code 75: error: disk is full") as end:
        run_all(runs)
    assert (started, end.value.exit_code) == (["a_seed1"], 75)


def test_an_interrupt_ends_a_trainer_that_is_only_about_to_start(shared, tmp_path, monkeypatch):
    outlook_of, main = seed_runs.outlook_of, threading.main_thread().ident
    runs = plan_runs({"a": []}, shared, seeds=(1,), out=tmp_path)

    def interrupted(run: SeedRun) -> Any:
        time.sleep(0.2)  # until the main thread waits for this one
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.2)  # in which the main thread looks for trainers that run
        return outlook_of(run)

    monkeypatch.setattr(seed_runs, "outlook_of", interrupted)
    with pytest.raises(SavedInterrupt, match="start again"):
        run_all(runs, jobs=2)
    assert [path.name for path in tmp_path.iterdir()] == ["settings"]


def test_the_failure_is_named_not_the_runs_that_did_not_start_after_it(shared, tmp_path):
    crowded = Mock(wraps=Machine())
    crowded.start.side_effect = CheckError("no room for a process")
    runs = plan_runs({"a": []}, shared, seeds=tuple(range(9)), out=tmp_path)
    for _ in range(5):  # the order in which threads end is chance
        with pytest.raises(CheckError, match="no room for a process"):
            run_all(runs, jobs=2, machine=crowded)


def test_no_run_starts_after_a_table_could_not_be_written(shared, tmp_path, capsys):
    slow = Mock(wraps=Machine())
    slow.start = lambda *_: subprocess.Popen(["sleep", "0.3"], stderr=subprocess.PIPE, text=True)
    runs = plan_runs({"a": []}, shared, seeds=tuple(range(9)), out=tmp_path)
    with pytest.raises(ZeroDivisionError):
        run_all(runs, jobs=2, machine=slow, refresh=lambda done: 1 / 0, may_stop=True)
    assert "[9/9] " not in capsys.readouterr().err


def test_runs_that_end_after_another_failed_count_as_complete(shared, tmp_path, monkeypatch):
    both_began = threading.Barrier(2)
    seen: list[Any] = []

    def train(run: Any, *_: Any, **__: Any) -> None:
        both_began.wait(timeout=60)
        if run.setting == "a":
            raise CheckError("a failed")
        time.sleep(0.1)

    runs = plan_runs({"a": []}, shared, seeds=(1,), out=tmp_path)
    runs += plan_runs({"b": []}, shared, seeds=(2,), out=tmp_path)
    monkeypatch.setattr(seed_runs, "_run_one", train)
    with pytest.raises(CheckError, match="a failed"):
        run_all(runs, jobs=2, refresh=seen.append)
    assert seen == [runs[1:]]


def test_a_run_that_diverges_is_recorded_and_the_others_go_on(shared, started, tmp_path, capsys):
    (tmp_path / "s.txt").write_text("base:\nhot: --max_lr=1e30\ncold: --max_lr=1e-5\n")
    out = tmp_path / "out"
    words = [str(tmp_path / "s.txt"), f"--out={out}", "--seeds=1", *shared, "--json"]
    for _ in range(2):  # started again, it trains nothing, and says the same
        with pytest.raises(CheckError, match="1 of 3 runs diverged: hot_seed1; give their") as end:
            ablate.main(words)
        assert (end.value.exit_code, started) == (1, ["base_seed1", "hot_seed1", "cold_seed1"])
    said = capsys.readouterr()
    assert "[2/3] hot_seed1: diverged: step 2: validation loss nan" in said.err
    found = json.loads(said.out.splitlines()[-1])
    assert found == json.loads((out / "ablation.json").read_text())
    base, hot, cold = found["settings"]
    assert (hot["seeds"], hot["diverged"], hot["loss"], hot["curves"]) == (1, 1, None, [None])
    assert (base["diverged"], cold["reached"]) == (0, 0)
    assert [one["setting"] for one in found["comparisons"]] == ["cold"]
    (said_of_hot,) = found["diverged"].values()
    assert said_of_hot == "hot diverged in 1 of 1 seed, so it is not compared with base."
    assert found["spent"]["tokens"] == 2 * 768 + 2 * 128
    assert found["diverged"]["hot"] in (out / "ablation.md").read_text()
    draw_table("ablation", out / "ablation.json", tmp_path / "a.svg", View("tokens"))
    assert "hot, diverged in 1 of 1" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("flag", "seeds"),
    [
        *(("--seed=3", (1,)), ("--resume=latest", (1,)), ("--max_lrr=1", (1,))),
        *(("--n_head=3", (1,)), ("--val_tokens=640", (1,)), ("--log_freq=9", (1, 1))),
        *(("--dry_run", (1,)), ("--average_tail=0.5", (1,)), ("--early_stopping_patience=2", (1,))),
        ("--branch_from=a@1", (1,)),
    ],
)
def test_settings_that_cannot_be_compared_run_nothing(shared, tmp_path, flag, seeds, wording):
    with pytest.raises(ConfigError, check=wording):
        plan_runs({"a": [], "b": [flag]}, shared, seeds=seeds, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_name_too_long_for_a_file_and_an_out_that_is_one_are_rejected(shared, tmp_path):
    settings = {"a": [], "ä" * 117: ["--max_lr=0.01"]}  # with _seed1 240 bytes
    plan_runs(settings, shared, seeds=(1,), out=tmp_path)[1].write_settings()
    out = tmp_path / "out"
    with pytest.raises(
        ConfigError, match=r"^setting ä{30}\.\.\.: .* 241 bytes, 240 at most; shorten it$"
    ):
        plan_runs(settings, shared, seeds=(1, 10), out=out)
    assert not out.exists()
    out.touch()
    with pytest.raises(ConfigError, match=r"^--out .*out: a file; give the folder of the runs"):
        plan_runs({"a": []}, shared, seeds=(1,), out=out)


def test_a_flag_with_several_values_is_a_grid() -> None:
    argv = ["s.txt", "--out=x", "--max_lr", "1e-3", "2e-3", "--max_tokens", "1M", "--jobs", "2"]
    words, shared, grid = take_grid([*argv, "--use_tensorboard", "--n_layer=1"], ablate._OWN)
    assert words == ["s.txt", "--out=x", "--jobs", "2"]
    assert shared == ["--max_tokens", "1M", "--use_tensorboard", "--n_layer=1"]
    assert grid == {"max_lr": ["1e-3", "2e-3"]}
    found = cross({"a": ["--seed=1"]}, grid | {"dropout": ["0", "0.1"]})
    assert next(iter(found)) == "a_max_lr-1e-3_dropout-0"
    assert found["a_max_lr-2e-3_dropout-0.1"] == ["--seed=1", "--max_lr=2e-3", "--dropout=0.1"]
    assert (len(found), list(cross({"": []}, grid))) == (4, ["max_lr-1e-3", "max_lr-2e-3"])
    with pytest.raises(ConfigError, match="--max_lr: 1 is duplicated"):
        cross({"": []}, {"max_lr": ["1", "1"]})
    with pytest.raises(ConfigError, match="--data_dir a/b a_b: some of their runs would have the"):
        cross({"x": []}, {"data_dir": ["a/b", "a_b"]})


EACH = "--config f.toml,--config=f.toml,--preset 1xa100,--no_deterministic,--use_tensorboard"


@pytest.mark.parametrize("flags", [words.split() for words in EACH.split(",")])
def test_every_flag_of_the_trainer_goes_to_each_run_of_a_grid(flags: list[str]) -> None:
    own = ["--out", "x", "s.txt", "--json"]
    for argv in ([*flags, *own], [*own[:2], *flags, *own[2:]]):
        words, shared, grid = take_grid(["--max_lr", "1e-3", "2e-3", *argv], ablate._OWN)
        assert (words, shared) == (own, flags)
        assert grid == {"max_lr": ["1e-3", "2e-3"]}


@pytest.mark.parametrize(
    "words",
    [
        *("--out=x --learning_rate 1e-3 2e-3", "--out=x --max_lrr 1 2", "--out=x --qqqq 1 2"),
        *("--max_lr 1e-3", "--max_lr 1e-3 --out=x"),
    ],
)
def test_a_comparison_that_means_nothing_is_one_line(tmp_path: Path, words: str, wording) -> None:
    wording(launch.rejected(launch.call("ablate", *words.split(), folder=tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_flags_that_no_settings_file_holds_stay_flags(shared: list[str]) -> None:
    own = ["--mini_batch_size", "auto", "--preset=1xa100", "--max_lr=0.01"]
    own += ["--stop_after_steps", "3"]
    shared = [flag for flag in shared if not flag.startswith("--mini_batch_size")]
    found = read_requests({"a": [], "b": own}, shared)
    assert (found["a"].flags, found["b"].flags) == ((), (*own[:3], *own[4:]))
    assert "mini_batch_size" not in found["b"].request.chosen


def test_a_file_of_settings_gives_way_to_the_ablation_s_own(shared, tmp_path):
    """A run's config.json always holds a seed, a name and a folder."""
    settings = to_flat(parse([*shared, "--seed=9", "--run_name=r", "--log_freq=3"]).config)
    (tmp_path / "a.json").write_text(json.dumps(settings))
    argv = [f"--config={tmp_path / 'a.json'}"]
    runs = plan_runs({"a": [], "b": ["--max_lr=0.01"]}, argv, seeds=(4,), out=tmp_path / "out")
    found = [to_flat(run.request.config) for run in runs]
    assert {(one["seed"], one["log_freq"]) for one in found} == {(4, 3)}
    assert [one["run_name"] for one in found] == ["a_seed4", "b_seed4"]
    assert {one["checkpoint_dir"] for one in found} == {str(tmp_path / "out")}


def test_jobs_on_the_cpu_need_no_gpus(shared, started, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    settings = {"a": ["--max_steps=1"], "b": ["--max_steps=1", "--max_lr=0.01"]}
    flags = [flag for flag in shared if not flag.startswith(("--max_tokens", "--device"))]
    runs = plan_runs(settings, flags, seeds=(1,), out=tmp_path)
    with pytest.raises(ConfigError, match="--jobs 2: there is room for 1 run at a time"):
        run_all(runs, jobs=2)
    assert started == []
    runs = plan_runs(settings, [*flags, "--device=cpu"], seeds=(1,), out=tmp_path)
    monkeypatch.setattr(seed_runs, "_run_one", lambda *_, **__: None)
    run_all(runs, jobs=2)
    environments = Machine().environments(2, on_cpu=True)
    assert [set(environment) for environment in environments] == [{"OMP_NUM_THREADS"}] * 2


@pytest.mark.parametrize("edited", [{}, {"val_loss": "x"}, {"val_loss": [1.0]}])
def test_an_evaluation_whose_loss_was_edited_away_is_none(edited, tmp_path):
    launch.append(tmp_path, event="step", tokens=8, step_seconds=1.0)
    launch.append(tmp_path, event="eval", **edited)
    with pytest.raises(CheckError, match="no validation loss was logged"):
        read_curve(tmp_path)

"""`ablate --until_decided`: stops for a clear difference, goes on for an unclear one, continues where it stood."""

import json
from pathlib import Path

import numpy as np
import pytest

import launch
from gpt2lab.commands import ablate
from gpt2lab.config.request import RunRequest
from gpt2lab.errors import ConfigError
from gpt2lab.lab.ablation import Ablation, all_seeds
from gpt2lab.lab.seed_runs import SeedRun, Setting
from tiny import TINY

SETTINGS = ("base", "clear", "noisy")


def test_the_budget_names_every_seed() -> None:
    assert all_seeds((1337,), 4, settings=2) == [1337, 1338, 1339, 1340]
    assert all_seeds((3, 1), 4, settings=2) == [3, 1, 4, 5]
    assert all_seeds((1, 2, 3), 3, settings=2) == [1, 2, 3]
    for most, settings in ((2, 2), (3, 3)):
        with pytest.raises(ConfigError, match=f"with {settings} settings"):
            all_seeds((1,), most, settings=settings)
    with pytest.raises(ConfigError, match="--max_seeds 4 is less than the 5 seeds of --seeds"):
        all_seeds((1, 2, 3, 4, 5), 4, settings=2)


def write_run(folder: Path, setting: str, seed: int) -> None:
    """Write a last loss: of all settings alike with one seed, lower by 0.5 if clear, by noise if not."""
    rng = np.random.default_rng(seed)
    common, noise = rng.normal(4, 0.3), rng.normal(0, 0.02, 2)
    loss = common + {"base": 0, "clear": -0.5 + noise[0] / 10, "noisy": noise[1]}[setting]
    folder.mkdir(parents=True)
    last = {"attempt": 1, "step": 1}
    launch.append(folder, event="begin", attempt=1, step=0, max_steps=1, world_size=1)
    launch.append(folder, event="step", **last, tokens=64, step_seconds=1.0, loss=loss)
    launch.append(folder, event="eval", **last, val_loss=loss)


def trained(
    out: Path, monkeypatch: pytest.MonkeyPatch, *, most: int, jobs: int = 1, diverges: str = ""
) -> tuple[Ablation, list[SeedRun], list[list[str]]]:
    """Run an ablation whose runs write their loss at once; return it, its runs, and the names of each round's runs."""
    rounds: list[list[str]] = []

    def train(self: Ablation, new: list[SeedRun], before: list[SeedRun]) -> None:
        assert {run.name for run in before} == {path.name for path in out.iterdir()}
        rounds.append([run.name for run in new])
        for run in new:
            write_run(run.folder, run.setting, run.seed)
            if (run.setting, run.seed) == (diverges, 2):
                status = {"state": "failed", "step": 1, "time": 1.0, "exit_code": 76}
                (run.folder / "status.json").write_text(json.dumps(status))

    monkeypatch.setattr(Ablation, "_train", train)
    monkeypatch.setattr("gpt2lab.lab.ablation.check_runs", lambda runs: None)
    monkeypatch.setattr("gpt2lab.lab.ablation._reject_unequal_tokens", lambda runs: None)
    settings = dict.fromkeys(SETTINGS, Setting(RunRequest()))
    ablation = Ablation(settings, out, smallest=0.001, max_seeds=most, jobs=jobs)
    return ablation, ablation.run([1]), rounds


@pytest.mark.parametrize("jobs", [1, 6])
def test_seeds_are_added_for_those_that_are_not_decided(tmp_path, jobs, monkeypatch, capsys):
    _, done, rounds = trained(tmp_path, monkeypatch, most=10, jobs=jobs)
    assert len(rounds[0]) == 12  # of two comparisons, 4 seeds are the fewest that can decide
    later = [name for names in rounds[1:] for name in names]
    assert later == [f"{setting}_seed{n}" for n in range(5, 11) for setting in ("base", "noisy")]
    assert {len(names) for names in rounds[1:]} == {2 if jobs == 1 else 6}
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "after 4 of at most 10 seeds, not decided: noisy"
    assert len(said) == len(rounds) - 1
    assert [run.name for run in done] == [name for names in rounds for name in names]


@pytest.mark.parametrize("which", SETTINGS)
def test_a_setting_that_diverged_gets_no_more_seeds(tmp_path, which, monkeypatch):
    """Without a baseline there is nothing left to decide."""
    ablation, done, _ = trained(tmp_path, monkeypatch, most=6, diverges=which)
    more = [f"{s}_seed{n}" for n in (5, 6) for s in ("base", "noisy")] if which == "clear" else []
    assert [run.name for run in done][12:] == more
    _, found = ablation.write(done)
    left = {"base": [], "clear": ["noisy"], "noisy": ["clear"]}[which]
    assert [one["setting"] for one in found["comparisons"]] == left
    assert list(found["diverged"]) == [which]
    for one in found["comparisons"]:  # as was decided by
        assert one["sequential"]["confidence"] == 0.975


FLAGS = [
    *(*TINY, "--n_layer=1", "--n_embd=16", "--max_lr=0.01", "--max_tokens=768"),
    *("--eval_freq=0", "--sample_freq=0", "--checkpoint_freq=0"),
]


@pytest.mark.parametrize(
    "words",
    [
        *("--max_seeds=5", "--until_decided --max_seeds=2", "--seeds", "--target=nan"),
        *("--smallest_difference=0", "--smallest_difference=nan", "--until_decided"),
    ],
)
def test_what_cannot_be_decided_is_one_line(tiny_data, tmp_path, words, wording):
    settings, out = tmp_path / "settings.txt", tmp_path / "out"
    settings.write_text("base: --max_tokens=768\nlong: --max_tokens=1280\n")
    flags = [flag for flag in FLAGS if not flag.startswith("--max_tokens")]
    typed = [f"--out={out}", *words.split(), *flags, f"--data_dir={tiny_data}"]
    wording(launch.rejected(launch.call("ablate", settings, *typed)))
    assert not out.exists()


@pytest.mark.slow
def test_real_runs_stop_when_they_are_decided(tiny_data, tmp_path, started, capsys):
    """A rate of a hundredth is clearly worse; another order of the windows is not decided within 5 seeds.

    14 runs of six steps, also continued and compared as groups.
    """
    settings = tmp_path / "settings.txt"
    settings.write_text("base:\ncold: --max_lr=0.0001\nwindows: --shuffle=windows\n")
    words = [str(settings), f"--out={tmp_path / 'out'}", "--until_decided", "--max_seeds=5"]
    words += ["--seeds=1", "--smallest_difference=0.0001", *FLAGS, f"--data_dir={tiny_data}"]
    assert ablate.main([*words, "--max_seeds=4"]) == 0  # the budget is spent
    assert len(started) == 12
    assert "The budget was spent before windows could be decided" in capsys.readouterr().out
    assert (ablate.main([*words, "--json"]), started[12:]) == (0, ["base_seed5", "windows_seed5"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / "out" / "ablation.json").read_text())
    cold, windows = found["comparisons"]
    assert (cold["verdict"], cold["sequential"]["seeds"]) == ("worse", 4)
    assert cold["sequential"]["low"] > 0
    assert (windows["verdict"], windows["sequential"]["seeds"]) == ("not decided", 5)
    assert [row["seeds"] for row in found["settings"]] == [5, 4, 5]
    spent = {"seeds": 5, "max_seeds": 5, "runs": 14, "tokens": 14 * 768, "step_seconds": 0}
    assert found["spent"] | {"step_seconds": 0} == spent
    runs = (tmp_path / "out").glob("*_seed*")
    logged = {run.name: launch.events(run, "eval")[-1]["val_loss"] for run in runs}
    differences = [logged[f"cold_seed{n}"] - logged[f"base_seed{n}"] for n in range(1, 5)]
    assert cold["over_seeds"]["mean"] == pytest.approx(np.mean(differences))
    assert cold["over_units"]["mean"] == pytest.approx(np.mean(differences))
    assert (cold["over_units"]["paired"], cold["over_units"]["n"]) == (True, 20)

    pair = (f"{tmp_path / 'out'}/base_seed*", f"{tmp_path / 'out'}/windows_seed*")
    answer = json.loads(launch.call("compare", *pair, "--json").stdout)
    assert answer["seeds"] == [1, 2, 3, 4, 5]
    assert answer["over_seeds"] == pytest.approx(windows["over_seeds"])
    assert answer["over_units"] == pytest.approx(windows["over_units"])
    assert "not decided: B - A is " in launch.call("compare", *pair).stdout
    assert answer["p_holm"] == pytest.approx(answer["over_seeds"]["p"])
    for names, says in (
        ((pair[0], f"{tmp_path / 'out'}/cold_seed*"), "seed 5 is only in "),
        ((f"{tmp_path / 'out'}/*_seed1", pair[0]), "max_lr is 0.01 in base_seed1 and 0.0001 in"),
        ((f"{tmp_path}/none*", pair[0]), "none*: no run of this name"),
        ((",", pair[0]), ": no run of this name"),
        ((",".join([f"{tmp_path / 'out'}/base_seed1"] * 2), pair[1]), "seed 2 is only in"),
        ((*pair, "--only=hellaswag"), "have nothing to compare: no run has hellaswag results"),
        ((*pair, "--smallest_difference=0"), "--smallest_difference 0 must be a number above 0"),
    ):
        done = launch.call("compare", *names)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
        assert done.stderr.count("\n") == 1

"""Groups of runs: what is compared with which error, and what may not be compared."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import launch
from gpt2lab.checkpoint.catalog import list_checkpoints
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import Results, file_of_step, write_results
from gpt2lab.interop.tasks import TaskResults, keep_tasks
from gpt2lab.lab.compare import compare, compare_groups, describe_groups, groups_as_json
from tiny import edit_json, write_shards
from whole_run import Run


def test_losses_on_other_data_are_not_compared(tmp_path: Path, capsys) -> None:
    sizes = {"one": 650, "other": 800}
    places = [write_shards(tmp_path / n, train=(1003,), val=(s,)) for n, s in sizes.items()]
    for seed in (1, 2):
        for name, data in zip("ab", places, strict=True):
            run = Run(data, tmp_path, "--max_steps=2", "--eval_freq=0", "--sample_freq=0")
            run.train(f"--run_name={name}_{seed}", f"--seed={seed}")
    with pytest.raises(DataError, match="were validated on different data"):
        compare_groups("a_*", "b_*", checkpoint_dir=tmp_path)
    with pytest.raises(DataError, match=r"a_1 was trained on data \w{12} and b_2 on \w{12};"):
        compare_groups("a_1,b_2", "a_*", checkpoint_dir=tmp_path)
    found = compare_groups("a_*", "a_*", checkpoint_dir=tmp_path)
    assert "note: a_* and a_* mean the same runs; name two groups" in capsys.readouterr().err
    (loss,) = found.metrics
    assert (found.seeds, loss.step_a, loss.found.over_seeds.mean) == ((1, 2), 2, 0)
    assert describe_groups(found).startswith("A  a_*\nB  a_*\n\n")


def keep_items(run: Path, right: np.ndarray, name: str = "quiz") -> None:
    """Keep a task's items and HellaSwag's in a run, as evaluate.py and the trainer do."""
    numbers = {name: {"task": name, "n": len(right), "num_fewshot": 0, "metrics": {}}}
    items = Results("tasks", {"name": name, "items": "x"}, {"acc": right}, {})
    (checkpoint,) = list_checkpoints(run)[0]
    assert keep_tasks(TaskResults(numbers, {name: items}), run, checkpoint.step) is None
    scores = {"acc": 1 - right, "acc_norm": right}
    kept = Results("hellaswag", {"items": len(right)}, scores, {}, step=2)
    write_results(file_of_step(run, "hellaswag", 2), kept)
    event = {"event": "hellaswag", "step": 2, "time": 1.0, "attempt": 1, "n": len(right)}
    with (run / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(event) + "\n")


def test_items_are_compared_with_both_errors(tmp_path: Path, tiny_data: Path, capsys) -> None:
    """Over seeds as scipy's paired t test, over items as the mean over seeds of each item."""
    rng, right = np.random.default_rng(3), {}
    hard = rng.random(60)
    Run(tiny_data, tmp_path, "--max_steps=2", "--eval_freq=0", "--sample_freq=0").train()
    for seed in (1, 2, 3):
        for name, more in (("a", 0.0), ("b", 0.25)):
            run = shutil.copytree(tmp_path / "tiny", tmp_path / f"{name}_{seed}")
            edit_json(run / "config.json", seed=seed)
            right[name, seed] = (rng.random(60) < hard + more).astype(float)
            keep_items(run, right[name, seed])
    found = compare_groups("a_*", "b_*", checkpoint_dir=tmp_path, smallest=0.3)
    by_name = {one.found.metric: one.found for one in found.metrics}
    assert list(by_name) == ["val_loss", "acc", "acc_norm", "quiz acc"]
    quiz = by_name["quiz acc"]
    of_a, of_b = ([right[name, seed] for seed in (1, 2, 3)] for name in "ab")
    known = stats.ttest_rel(np.mean(of_b, axis=1), np.mean(of_a, axis=1))
    assert quiz.over_seeds.p == pytest.approx(known.pvalue)
    low, high = known.confidence_interval()
    assert (quiz.over_seeds.low, quiz.over_seeds.high) == (pytest.approx(low), pytest.approx(high))
    items = stats.ttest_1samp(np.mean(of_b, axis=0) - np.mean(of_a, axis=0), 0)
    assert quiz.over_units.low == pytest.approx(items.confidence_interval().low)
    assert (quiz.over_units.unit, quiz.over_units.n) == ("item", 60)
    assert quiz.verdict == ("higher" if known.pvalue < 0.05 else "not decided")
    assert by_name["val_loss"].over_seeds.mean == 0
    assert by_name["acc"].over_seeds.mean == pytest.approx(-quiz.over_seeds.mean)
    assert quiz.seeds_needed.difference == 0.3
    said = describe_groups(found)
    assert ("quiz acc: " in said, "nats" in said.split("quiz acc: ")[1]) == (True, False)
    assert "on the same documents or items" in said.replace("windows", "documents")
    answer = groups_as_json(found)
    assert (answer["metric"], answer["unit"]) == ("val_loss", "nats/token")
    assert answer["metrics"]["quiz acc"]["unit"] is None
    (tmp_path / "it.json").write_text(json.dumps(answer))
    words = ("--compare", tmp_path / "it.json", f"--out={tmp_path / 'it.svg'}")
    launch.worked(launch.call("plot", *words))
    picture = (tmp_path / "it.svg").read_text()
    for text in ("quiz acc", "acc_norm", "B - A, nats/token", "over seeds (95 %)", "a_*    B  b_*"):
        assert text in picture

    only = compare_groups("a_*", "b_*", checkpoint_dir=tmp_path, only="tasks")
    assert [one.found.metric for one in only.metrics] == ["quiz acc"]
    (tmp_path / "b_2" / "hellaswag" / "step_00000002.npz").unlink()
    found = compare_groups("a_*", "b_*", checkpoint_dir=tmp_path)
    assert found.left_out == ("b_2 has no hellaswag results",)
    assert [one.found.metric for one in found.metrics] == ["val_loss", "quiz acc"]
    with pytest.raises(DataError, match="have nothing to compare: b_2 has no hellaswag results"):
        compare_groups("a_*", "b_*", checkpoint_dir=tmp_path, only="hellaswag")
    edit_json(tmp_path / "b_2" / "status.json", exit_code=76)
    with pytest.raises(DataError, match="b_2 diverged, so it has no final results"):
        compare_groups("a_*", "b_*", checkpoint_dir=tmp_path)
    compare("a_1", "b_2", checkpoint_dir=tmp_path)
    assert "note: b_2 diverged; its newest results are from before" in capsys.readouterr().err
    edit_json(tmp_path / "b_2" / "status.json", exit_code=0)
    for seed in (1, 2, 3):
        keep_items(tmp_path / f"b_{seed}", right["b", seed][:50])
    with pytest.raises(DataError, match=r"was not measured on the same items \(60 and 50 items\)"):
        compare_groups("a_*", "b_*", checkpoint_dir=tmp_path)

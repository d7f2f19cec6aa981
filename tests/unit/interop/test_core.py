"""CORE gives nanochat's decisions and means, from a folder or a zip, for every tokenizer and number of ranks.

tests/golden/run_nanochat_core.py recorded what nanochat's own code says.
"""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import launch
from golden.run_nanochat_core import model_of
from gpt2lab.commands.evaluate import Evaluate, as_text, evaluate, main
from gpt2lab.errors import ConfigError, GPT2LabError
from gpt2lab.interop.core import measure_core, read_bundle
from gpt2lab.interop.tasks import TaskRequest, TaskResults, require_tasks
from gpt2lab.report.page import render
from gpt2lab.runs import history
from gpt2lab.tokenizers.named import open_tokenizer
from launch import SCRIPTS, ask, call
from one_process import Alone
from own_tasks import write_bundle
from tiny import flags_of, parse, pretrain, write_inputs

ANSWERS = json.loads((Path(__file__).parents[2] / "golden" / "core_nanochat.json").read_text())


def measured(answer: dict[str, Any], bundle: Path) -> TaskResults:
    tasks = read_bundle(bundle, answer["limit"])
    strategy, tokenizer = Alone("fp32"), open_tokenizer(answer["tokenizer"])
    assert measure_core(tasks, model_of(answer), strategy, tokenizer, lambda: True) is None
    return measure_core(tasks, model_of(answer), strategy, tokenizer)


@pytest.mark.parametrize(
    "answer",
    ANSWERS["answers"],
    ids=lambda a: f"{a['tokenizer']}-{a['limit']}-{a['model']['context_length']}",
)
def test_every_decision_and_mean_is_nanochats(answer, tmp_path):
    found = measured(answer, write_bundle(tmp_path))
    limit = answer["limit"]
    for label, decisions in answer["decisions"].items():
        name = f"core/{label}" + (f"-first{limit}" if limit else "")
        assert "".join(f"{right:.0f}" for right in found.items[name].per_unit["acc"]) == decisions
        metrics = found.numbers[name]["metrics"]
        assert metrics["acc"]["value"] == answer["results"][label]
        centered = metrics["centered"]["value"]
        assert centered == pytest.approx(answer["centered_results"][label], abs=1e-12)
    mean = found.numbers["core" + (f"-first{limit}" if limit else "")]["metrics"]["centered"]
    assert mean["value"] == pytest.approx(answer["core_metric"], abs=1e-12)


def test_errors_are_over_items_and_those_of_shared_items_together(tmp_path):
    found = measured(ANSWERS["answers"][0], write_bundle(tmp_path))
    right = {name: items.per_unit.get("acc") for name, items in found.items.items()}
    for name, baseline in (("choices", 0.5), ("schema", 0.4)):
        metrics = found.numbers[f"core/own_{name}"]["metrics"]
        error = np.std(right[f"core/own_{name}"], ddof=1) / np.sqrt(16)
        assert metrics["acc"]["se"] == pytest.approx(error)
        assert metrics["centered"]["se"] == pytest.approx(error / (1 - baseline))
    # Both tasks of choices have the same items: 64 of 80 are independent.
    both = (right["core/own_choices"] + right["core/own_choices_zeroshot"]) / 0.5
    others = (right["core/own_schema"] / 0.6, right["core/own_words"], right["core/own_repeats"])
    variance = sum(np.var(of_source, ddof=1) / 16 for of_source in (both, *others)) / 5**2
    assert found.numbers["core"]["metrics"]["centered"]["se"] == pytest.approx(np.sqrt(variance))
    assert found.numbers["core"]["n"] == 64
    (said,) = found.warnings
    assert said.startswith("CORE: the mean is over 5 tasks, of 22 in the published bundle: ")


def edited(bundle: Path, name: str, *rows: dict[str, Any]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (bundle / "eval_data" / "own" / f"{name}.jsonl").write_text(lines)
    return bundle


def test_what_nanochat_stops_at_is_scored_as_far_as_it_goes(tmp_path):
    """A continuation longer than the context, one that joins the word before it, and equal options."""
    bundle, answer = write_bundle(tmp_path), ANSWERS["answers"][1]  # a context of 24 tokens
    repeated = [{"context": "bus", "continuation": "bus " * 40 + "bus"} for _ in range(4)]
    joined = [{"context": "so", "continuation": "me more"} for _ in range(6)]
    equal = [{"context_options": ["A", "A"], "continuation": "b", "gold": k % 2} for k in range(4)]
    text = (bundle / "core.yaml").read_text()
    (bundle / "core.yaml").write_text(text.replace('"\\nAnswer : "', '""'))
    edited(edited(edited(bundle, "repeats", *repeated), "words", *joined), "schema", *equal)
    found = measured(answer, bundle)
    centered = [one["metrics"]["centered"]["value"] for one in found.numbers.values()]
    assert np.isfinite(centered).all()
    assert found.numbers["core/own_schema"]["metrics"]["acc"]["value"] == 0.5  # the first
    cut = {one["task"]: one.get("cut") for one in found.numbers.values()}
    assert (cut["own_repeats"], cut["own_words"], cut["own_choices"]) == (4, 0, 16)
    assert found.warnings[0].startswith("CORE: ")
    alike = [{"query": "bus", "choices": ["A", "A"], "gold": k % 2} for k in range(4)]
    found = measured(answer, edited(bundle, "choices", *alike))  # nothing to score in the task
    assert found.numbers["core/own_choices"]["metrics"]["acc"]["value"] == 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with two runs, `a` and `b`, and the bundle as it is published: a folder in a zip."""
    folder = write_inputs(tmp_path_factory.mktemp("core"))
    write_bundle(folder / "unpacked" / "eval_bundle")
    shutil.make_archive(str(folder / "bundle"), "zip", folder / "unpacked")
    for name, seed in (("a", 1), ("b", 2)):
        pretrain(parse([*flags_of(folder, name, *MORE, f"--seed={seed}")]))
    return folder


MORE = ("--context_length=64", "--total_batch_size=128", "--hellaswag_freq=0", "--reduce=exact")


def scored(folder: Path, name: str, *more: str) -> list[str]:
    """Return the flags of run `a`, scored on CORE after two steps and four."""
    return [*flags_of(folder, name, *MORE, "--seed=1", f"--core={folder / 'bundle.zip'}"), *more]


def test_training_scores_it_as_evaluate_does_and_trains_the_same_bits(folder):
    """Also where a stop comes between."""
    runs = folder / "runs"
    pretrain(parse(scored(folder, "c", "--core_freq=2", "--stop_after_steps=3")))
    pretrain(parse(["--run_name=c", "--resume=latest", f"--checkpoint_dir={runs}"]))
    for name in ("model.safetensors", "optim.safetensors"):
        a, c = ((runs / run / "step_00000004" / name).read_bytes() for run in "ac")
        assert a == c
    events = history.read_log(runs / "c").current("core")
    assert set(events) == {2, 4}
    names = [f"evaluations/step_{step:08d}.json" for step in events]
    kept = [json.loads((runs / "c" / name).read_text())["tasks"] for name in names]
    for event, tasks in zip(events.values(), kept, strict=True):
        mean = tasks["core"]["metrics"]["centered"]
        assert (event["centered"], event["centered_se"]) == (mean["value"], mean["se"])
        assert event["tasks"] == len(tasks) - 1
        assert (event["n"], event["cut"]) == (tasks["core"]["n"], tasks["core"]["cut"])
    assert evaluate(Evaluate("a", runs, core=folder / "bundle.zip"))["tasks"] == kept[1]
    rows = ask("compare", "a", "c", "--only=tasks", "--json", folder=folder)["metrics"]
    assert rows["core centered"]["difference"] == 0


@pytest.mark.parametrize(
    "typed",
    [
        *("--core=no.zip", "--core=no.zip --dry_run", "--core_freq=2 --core_limit=8"),
        *("--core_freq=2", "--core=BUNDLE --core_limit=3", "--core=BUNDLE --vocab_size=300"),
        "--core=BUNDLE --gpus=2 --core_limit=1",
    ],
)
def test_training_rejects_in_one_line_before_anything_is_written(
    folder, tmp_path, monkeypatch, typed, wording
):
    monkeypatch.chdir(tmp_path)
    more = typed.replace("BUNDLE", str(folder / "bundle.zip")).split()
    done = call("train", *flags_of(folder, "x", *MORE, "--mini_batch_size=1", *more))
    wording(launch.rejected(done))
    assert not (folder / "runs" / "x").exists()


def test_evaluate_keeps_it_in_the_run_and_compare_pairs_it(folder, tmp_path, capsys):
    runs = folder / "runs"
    zipped = {"core": folder / "bundle.zip"}
    found = {run: evaluate(Evaluate(run, runs, **zipped, save=tmp_path / run)) for run in "ab"}
    assert "have prompts over the model's context of 64 tokens" in capsys.readouterr().err
    a = found["a"]
    kept = json.loads((runs / "a" / "evaluations" / "step_00000004.json").read_text())["tasks"]
    assert kept == a["tasks"]
    mean = a["tasks"]["core"]["metrics"]["centered"]
    assert f"{mean['value']:.4f} +- {mean['se']:.4f} on 64 items" in as_text(a)
    assert '<td class="mono">core/own_schema</td>' in render(runs / "a")
    for one in ("a", str(tmp_path / "a")):
        rows = ask("compare", one, "b", "--only=tasks", "--json", folder=folder)["metrics"]
        assert len(rows) == 6
        row = rows["core centered"]
        assert row["n"] == 64
        assert row["a"] == pytest.approx(mean["value"], rel=1e-12)
        other = found["b"]["tasks"]["core"]["metrics"]["centered"]
        assert row["b"] == pytest.approx(other["value"])
    limited = evaluate(Evaluate("a", runs, core=folder / "unpacked", core_limit=8))
    assert limited["tasks"]["core/own_schema-first8"]["n"] == 8
    whole = folder / "unpacked" / "eval_bundle"
    assert evaluate(Evaluate("a", runs, core=whole, core_limit=16))["tasks"] == a["tasks"]


@pytest.mark.slow
def test_two_processes_find_the_same_bits(folder):
    argv = ["a", f"--core={folder / 'bundle.zip'}", "--json"]
    alone = ask("evaluate.py", *argv, folder=folder)
    argv += [f"--checkpoint_dir={folder / 'runs'}"]
    done = launch.worked(launch.train_in_forks(argv, world=2, program=SCRIPTS / "evaluate.py"))
    assert json.loads(done.stdout) == alone
    for name, world in (("one", 1), ("two", 2)):
        flags = scored(folder, name, "--mini_batch_size=1", "--core_freq=2")
        launch.worked(launch.train_in_forks(flags, world=world))
    for name in ("step_00000002.json", "step_00000004.json"):
        one, two = (folder / "runs" / run / "evaluations" / name for run in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def written(name: str, old: str, new: str) -> Callable[[Path], Any]:
    def change(bundle: Path) -> None:
        text = (bundle / name).read_text()
        assert old in text
        (bundle / name).write_text(text.replace(old, new, 1))

    return change


SCHEMA = "eval_data/own/schema.jsonl"
# A label that, as text, would fill the memory.
ALIASES = "a0: &a0 [x]\n"
ALIASES += "".join(f"a{n + 1}: &a{n + 1} [{f'*a{n}, ' * 9}]\n" for n in range(20))
ALIASES += "icl_tasks:\n- label: *a20\n  x: "
BROKEN: dict[str, Callable[[Path], Any]] = {
    "items missing": lambda b: (b / SCHEMA).unlink(),
    "baselines missing": lambda b: (b / "eval_meta_data.csv").unlink(),
    "no YAML": lambda b: (b / "core.yaml").write_text("a: ["),
    "no task": lambda b: (b / "core.yaml").write_text("icl_tasks: []"),
    "one label twice": written("core.yaml", "_zeroshot", ""),
    "a number of shots": written("core.yaml", "num_fewshot: [3]", "num_fewshot: 3"),
    "another type": written("core.yaml", "type: schema", "type: chat"),
    "no baseline": written("eval_meta_data.csv", "own_words,own", "x,own"),
    "a word as baseline": written("eval_meta_data.csv", ",50", ",half"),
    "a choice that is not there": written(SCHEMA, '"gold": 1', '"gold": 2'),
    "no continuation": written(SCHEMA, '"continuation"', '"end"'),
    "no JSON": written(SCHEMA, "{", "["),
    "options that are no list": written(SCHEMA, 's": [', 's": "ab", "x": ['),
    "a label that is a list": written("core.yaml", "icl_tasks:\n- label: ", ALIASES),
    "a file too large": lambda b: os.truncate(b / SCHEMA, 2**28 + 1),
    "no UTF-8": lambda b: (b / SCHEMA).write_bytes(b"\xff"),
    "no items": lambda b: edited(b, "schema"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_bundle_is_one_line(case, tmp_path, wording):
    BROKEN[case](write_bundle(tmp_path))
    with pytest.raises(GPT2LabError, check=wording) as raised:
        read_bundle(tmp_path, None)
    assert raised.value.exit_code == 2


def test_wrong_flags_and_files_are_one_line(tmp_path):
    bundle = write_bundle(tmp_path / "bundle")
    assert read_bundle(bundle, None)[3].prompts(0)[0].endswith("There is a\nAnswer :")
    with pytest.raises(GPT2LabError, match=r"^--core_limit is for --core; give the bundle too$"):
        main(["a", "--core_limit=3"])
    with pytest.raises(GPT2LabError, match=r"own_words draws 5 .*; give --core_limit 6 or more$"):
        read_bundle(bundle, 5)
    (tmp_path / "text.zip").write_text("no zip")
    for name in ("text.zip", "nothing"):
        with pytest.raises(GPT2LabError, match=rf"^--core \S+{name}: no folder and no zip; give"):
            read_bundle(tmp_path / name, None)
    archive = Path(shutil.make_archive(str(tmp_path / "cut"), "zip", bundle))
    content = archive.read_bytes()
    place = content.index(b"icl_tasks") if b"icl_tasks" in content else content.index(b"core.yaml")
    archive.write_bytes(content[: place + 12] + b"\0" * 40 + content[place + 52 :])
    with pytest.raises(GPT2LabError, match=r"cut\.zip/core\.yaml: not as in DCLM's"):
        read_bundle(archive, None)


def test_flags_of_tasks_are_checked_before_anything_is_loaded(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^--limit is for --tasks; give its names too$"):
        main(["nobody", "--limit=3"])
    with pytest.raises(ConfigError, match=r"--hellaswag_limit$"):
        main(["nobody", "--hellaswag", "--limit=3"])
    with pytest.raises(ConfigError, match=r"^limit 0 must be at least 1$"):
        main(["nobody", "--tasks=piqa", "--limit=0"])
    real = importlib.util.find_spec
    known = {"lm_eval": ModuleSpec("lm_eval", None, is_package=True)}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: known.get(name) or real(name))
    with pytest.raises(ConfigError, match=r"^--tasks_path \S+: no such folder, or no task in it"):
        require_tasks(TaskRequest("piqa", tasks_path=tmp_path))
    (tmp_path / "some.yaml").write_text("tag: [all, others]\ntask: own_task\n")
    for names in ("own_task", "others, own_task"):
        require_tasks(TaskRequest(names, tasks_path=tmp_path))
    for names, said in (("own", "own"), ("own_task,own_tusk", "own_tusk: .*own_task"), (",", "")):
        with pytest.raises(ConfigError, match=rf"^--tasks:? ?{said}"):
            require_tasks(TaskRequest(names, tasks_path=tmp_path))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'gpt2lab\[lm-eval\]'$"):
        require_tasks(TaskRequest("piqa"))

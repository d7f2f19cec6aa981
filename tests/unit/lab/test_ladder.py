"""`gpt2lab ladder`: its file, its runs, the prediction before the top rung, and the planner that uses its law."""

import json
import re
import shutil
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import launch
from forecasting import job_for
from gpt2lab.commands import ladder
from gpt2lab.errors import CheckError, ConfigError, DataError
from gpt2lab.lab import seed_runs
from gpt2lab.lab.ladder import first_starts
from gpt2lab.lab.ladder_file import FAMILIES, Family, read_family
from gpt2lab.lab.seed_runs import SeedRun
from gpt2lab.planner import ladder as results
from gpt2lab.planner.ladder import Ladder
from gpt2lab.planner.scaling_law import Law, Rung, fit_law
from gpt2lab.runs import history
from gpt2lab.runs.folder import RunFolder
from launch import REPOSITORY
from tiny import CONTEXT, VOCAB, edit_json, train

FILE = f"""
tokens = [64, "128", 256]
seeds = [1, 2]
[settings]
n_layer = 1
n_head = 2
context_length = {CONTEXT}
vocab_size = {VOCAB}
total_batch_size = 64
mini_batch_size = 4
data_dir = "DATA"
val_tokens = 320
eval_freq = 0
sample_freq = 0
checkpoint_freq = 0
device = "cpu"
dtype = "fp32"
compile = "off"
[sizes]
a.n_embd = 8
b.n_embd = 12
c.n_embd = 18
[top]
n_embd = 24
tokens = 768
[rate]
n_embd = 8
max_lr = 0.02
exponent = 1
factors = [4]
"""


@pytest.fixture
def file(tiny_data: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(FILE.replace("DATA", str(tiny_data)))
    return path


def rates(family: Family, rung: str, *, factor: float = 1.0, **more: Any) -> tuple[Any, Any]:
    """Return max_lr and muon_lr of a rung with other settings."""
    optim = family.request(family.rungs[rung] | more, factor).config.optim
    return optim.max_lr, optim.muon_lr


def test_a_file_means_rungs_with_the_rate_of_their_width(file: Path) -> None:
    family = read_family(str(file))
    assert list(family.rungs)[::4] == ["a-64", "b-128", "c-256"]
    rung = family.request(family.rungs["c-256"], 1.0).config
    assert (rung.length.max_tokens, rung.model.n_embd, rung.optim.max_lr) == (256, 18, 0.00888889)
    assert rates(family, "c-256", factor=4.0) == (0.0355556, None)
    assert (family.rate.check, family.rate.factors) == (("a-64", "c-256"), (4.0,))
    micro = {"model": "modern-micro", "n_embd": 32}
    assert rates(family, "a-64", **micro) == (0.005, 0.0025)
    assert rates(family, "a-64", **micro, optimizer="adamw") == (0.005, None)
    # No rung takes the batch or the rates that suit its own length.
    fixed = {"total_batch_size", "max_lr", "muon_lr"}
    assert fixed <= family.request({**family.rungs["a-64"], **micro}, 1.0).chosen
    for name in FAMILIES:  # ladders of their own
        family = read_family(name)
        assert len(family.rungs) == 9
        assert family.top is not None
        assert family.rungs["w24-250K"]["model"] == f"{name.removesuffix('-tiny')}-nano"


def test_a_size_may_have_its_own_tokens_and_a_longer_run_a_lower_rate(file: Path) -> None:
    text, own = file.read_text(), 'c.n_embd = 18\nc.tokens = [128, "512"]'
    file.write_text(text.replace("c.n_embd = 18", own))
    assert list(read_family(str(file)).rungs)[3:] == ["b-64", "b-128", "b-256", "c-128", "c-512"]
    file.write_text(text)
    by_tokens = "exponent = 1\ntokens = 64\ntokens_exponent = 0.5"
    file.write_text(file.read_text().replace("exponent = 1", by_tokens))
    found = {name: rates(read_family(str(file)), name)[0] for name in ("a-64", "a-256", "c-256")}
    assert found == {"a-64": 0.02, "a-256": 0.01, "c-256": 0.00444444}
    file.write_text(file.read_text().replace("exponent = 1", "exponent = 99999", 1))
    assert rates(read_family(str(file)), "c-256")[0] == 0  # which no run accepts


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(('tokens = [64, "128", 256]', "tokens = []"), ('"128"', '"12x"')),
        ('"128", 256]', "1000000, 1000001]"),
        *(('tokens = [64, "128", 256]', ""), ("b.n_embd = 12", "b.tokens = 'x'")),
        *(("seeds = [1, 2]", "seeds = [1, 1]"), ("seeds =", "seed =")),
        *(("a.n_embd = 8", "a.n_embdd = 8"), ("a.n_embd = 8", "a.max_lr = 1.0")),
        ("seeds = [1, 2]\n[settings]", "seeds = [1, 2]\n[settings]\nlora_r = 4"),
        *(("tokens = 768", ""), ("exponent = 1", "exponent = 'x'")),
        *(("exponent = 1", "exponent = 1\ntokens = 64"), ("[sizes]", "[sizes")),
        ("exponent = 1", "exponent = 1\ntokens = 64\ntokens_exponent = -1"),
        *(("factors = [4]", "factors = [1]"), ("factors = [4]", "check = ['d']")),
    ],
)
def test_a_file_that_means_nothing_is_one_line(file: Path, old: str, new: str, wording) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, check=wording):
        read_family(str(file))


def test_what_is_no_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"modern-tin: .* modern-tiny?"):
        read_family("modern-tin")
    with pytest.raises(ConfigError, match="No such file"):
        read_family(str(tmp_path / "none.toml"))
    (tmp_path / "deep.toml").write_text("x = " + "[" * 9999)
    with pytest.raises(ConfigError, match=r"deep.toml: maximum recursion depth"):
        read_family(str(tmp_path / "deep.toml"))


@pytest.mark.parametrize("what", ["modern-tiny", "mine.toml"])
def test_a_ladder_without_its_data_names_both_commands_that_make_them(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(FILE.replace("DATA", "data/python_stdlib_512"))
    with pytest.raises(DataError) as caught:
        ladder.main(["plan", what])
    tokenizer, prepare = str(caught.value).partition("make it with: ")[2].split(" && ")
    assert "tokenizer train python-stdlib --vocab_size 512 --out tok512" in tokenizer
    assert "--tokenizer tok512 --val_tokens 900000 --out data/python_stdlib_512" in prepare


@pytest.mark.slow
def test_rungs_of_one_law_share_what_is_no_size(file: Path, tmp_path: Path) -> None:
    shorter = "b = {n_embd = 12, context_length = 8}"
    file.write_text(file.read_text().replace("b.n_embd = 12", shorter))
    runs = read_family(str(file), tmp_path / "out").rung_runs()
    with pytest.raises(ConfigError, match="context_length 16 in a-64, 8 in b-64"):
        first_starts(runs)


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_too_few_sizes_for_a_law_are_rejected_before_they_are_trained(verb, file, tmp_path):
    file.write_text(file.read_text().replace("c.n_embd = 18", ""))
    with pytest.raises(ConfigError, match="at least 3 sizes, and these rungs have 2: add rungs"):
        ladder.main([verb, str(file), f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_plan_counts_and_starts_nothing(file, tmp_path, capsys):
    out = tmp_path / "out"
    assert ladder.main(["plan", str(file), f"--out={out}", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["runs"] == 2 * (9 + 2 + 1)
    rows = {row["name"]: row for row in plan["rows"]}
    assert (rows["c-256"]["tokens"], rows["c-256"]["steps"]) == (256, 4)
    assert plan["flops"] == sum(2 * row["flops"] for row in plan["rows"])
    assert plan["seconds"]["low"] < plan["seconds"]["value"] < plan["seconds"]["high"]
    assert plan["warnings"] == []
    assert not out.exists()
    in_progress = RunFolder(out / "a-64_seed1")
    assert ladder.main(["plan", str(file), f"--out={out}", "--json"]) == 0
    with pytest.raises(CheckError, match=r"^a-64_seed1 is not complete: process \d+ .*; wait for"):
        ladder.main(["fit", str(file), f"--out={out}"])
    in_progress.close()
    again = re.escape(f"gpt2lab ladder run {file} --out {out}")
    with pytest.raises(CheckError, match=rf"^a-64_seed1 is not complete: {again}$"):
        ladder.main(["fit", str(file), f"--out={out}"])
    assert json.loads(capsys.readouterr().out)["flops"] == plan["flops"]
    file.write_text(file.read_text().replace("tokens = 768", "tokens = 300"))
    assert ladder.main(["plan", str(file), f"--out={out}"]) == 0
    said = "x the FLOPs of the most expensive rung; a test of the law needs at least 4 x"
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_the_top_rung_is_predicted_before_training(file, tmp_path, started, capsys, monkeypatch):
    """All of it: run, stop, go on, fit, predict, top, score; a top rung without prediction is rejected."""
    out = tmp_path / "out"
    words = [str(file), f"--out={out}"]
    train_here = seed_runs._Trainers.run

    def run(self: Any, run: SeedRun) -> tuple[int, str]:
        code = train_here(self, run)[0] + 76 * ("a-64_x4" in run.name)  # which diverges
        edit_json(run.folder / "status.json", exit_code=code)
        return code, "error: loss nan"

    monkeypatch.setattr(seed_runs._Trainers, "run", run)
    with pytest.raises(CheckError, match="a-64_seed1 is not complete"):
        ladder.main(["fit", *words])
    assert (ladder.main(["run", *words]), len(started)) == (0, 18 + 4)
    assert ", x4 diverged: the rate of the rule is the best" in capsys.readouterr().out
    assert not any(name.startswith("top") for name in started)
    document = json.loads((out / "ladder.json").read_text())
    assert (document["prediction"], document["score"]) == (None, None)
    found = {row["rung"]: row["losses"] for row in document["rates"]}
    assert (found["a-64"]["4"], len(found["a-64"]["1"]), len(found["c-256"]["4"])) == (None, 2, 2)
    record = out / "b-128_seed2" / "run.json"
    kept, data = record.read_text(), document["settings"]["data"]
    record.write_text(kept.replace(data, "0" * len(data)))
    with pytest.raises(DataError, match="b-128_seed2 was trained on other data than its"):
        ladder.main(["fit", *words])
    record.write_text(kept)
    (out / "top-768_seed1").mkdir()
    with pytest.raises(CheckError, match="top-768_seed1 was started before its loss was predicted"):
        ladder.main(["predict", *words])
    (out / "top-768_seed1").rmdir()
    assert ladder.main(["predict", *words, "--json"]) == 0
    written = (out / "prediction.json").read_text()
    assert ladder.main(["run", *words, "--top"]) == 0
    assert started[22:] == ["top-768_seed1", "top-768_seed2"]
    assert (out / "prediction.json").read_text() == written
    edit_json(out / "prediction.json", inputs_sha256="0")
    assert ladder.main(["fit", *words]) == 0
    said = capsys.readouterr().out
    assert re.search(r"brackets: 80 %(.*\n)+predicted.*80 %.*\nactual: ", said)
    assert said.count("; made from other rungs than this law\n") == 1
    score = json.loads((out / "ladder.json").read_text())["score"]
    log = history.read_log(out / "top-768_seed2").current("eval")
    assert score["losses"][1] == log[12]["val_loss"]
    assert score["seconds_after_prediction"] > 0

    assert ladder.main(["predict", *words, "--parameters=1M", "--tokens=1M"]) == 0
    assert "1,000,000 parameters, 1,000,000 tokens: loss " in capsys.readouterr().out
    launch.worked(launch.call("plot", "--ladder", str(out), "--out", str(tmp_path / "l.svg")))
    assert "top rung, trained" in (tmp_path / "l.svg").read_text()


@pytest.fixture
def longer(file: Path) -> Path:
    """Return a ladder of 3 sizes, 4 lengths of 10 to 80 steps, and 3 seeds."""
    text = file.read_text().replace("seeds = [1, 2]", "seeds = [1, 2, 3]")
    text = text.replace('[64, "128", 256]', '[640, "1280", 2560, 5120]')
    file.write_text(text.partition("[top]")[0] + "[rate]" + text.partition("[rate]")[2])
    return file


def test_trunks_train_0_58_of_the_tokens_of_separate_runs(longer, tmp_path, capsys):
    words = ["plan", str(longer), f"--out={tmp_path}", "--trunks"]
    assert ladder.main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    # A trunk of 80 steps, and cooldowns of 1, 2 and 4, for 150 steps in all.
    assert plan["tokens"] == {"rungs": 9 * 87 * 64, "separate": 9 * 150 * 64}
    assert [row["branches_at"] for row in plan["rows"][:4]] == [9, 18, 36, 0]
    assert ladder.main(words) == 0
    assert "train on 50,112 tokens, 0.58 of the 86,400 of separate runs" in capsys.readouterr().out


@pytest.mark.slow
def test_a_branch_of_a_trunk_has_the_bits_of_a_run_of_its_own(
    longer, tmp_path, started, monkeypatch
):
    text = longer.read_text().replace("seeds = [1, 2, 3]", "seeds = [1]")
    longer.write_text(text.replace("2560, 5120]", "2560]") + "check = []")
    words = [str(longer), f"--out={tmp_path}", "--trunks"]
    with (
        monkeypatch.context() as job,
        pytest.raises(CheckError, match="K_seed1 stopped before ste"),
    ):
        job.setenv("SLURM_JOB_END_TIME", "1")
        ladder.main(["run", *words])
    started.clear()
    assert ladder.main(["run", *words]) == 0
    lengths = ("2.56K", "640", "2.56K", "1.28K", "2.56K")
    assert started == [f"{size}-{n}_seed1" for n in lengths for size in "abc"]
    found = json.loads((tmp_path / "ladder.json").read_text())["rungs"][1]
    trunk, branch = (tmp_path / f"a-{name}_seed1" for name in ("2.56K", "1.28K"))
    train([f"--config={tmp_path / 'settings' / branch.name}.json", "--run_name=alone"])
    alone = launch.losses(tmp_path / "alone")
    before = {step: loss for step, loss in launch.losses(trunk).items() if step <= 18}
    assert before | launch.losses(branch) == alone
    hashes = [launch.parameter_hash(path, 20) for path in (branch, tmp_path / "alone")]
    assert hashes[0] == hashes[1]
    assert found["losses"] == [history.read_log(branch).current("eval")[20]["val_loss"]]
    assert ladder.main(["run", *words]) == 0  # complete
    assert len(started) == 15


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(('dtype = "fp32"', 'dtype = "fp32"\nlr_schedule = "linear"'), ("[640,", "[64,")),
        ("exponent = 1", "exponent = 1\ntokens = 64\ntokens_exponent = 0.5"),
    ],
)
def test_what_cannot_branch_from_a_trunk_is_one_line(longer, tmp_path, old, new, wording):
    longer.write_text(longer.read_text().replace(old, new))
    with pytest.raises(ConfigError, check=wording):
        ladder.main(["plan", str(longer), f"--out={tmp_path}", "--trunks"])


PREDICTIONS = sorted((REPOSITORY / "docs" / "ladders").glob("*_prediction.json"))


@pytest.mark.parametrize("path", PREDICTIONS, ids=lambda path: path.stem)
def test_a_committed_prediction_follows_from_its_rungs_and_is_on_the_page(path, tmp_path):
    written = json.loads(path.read_text())
    actual = path.with_name(path.name.replace("_prediction", "_results"))
    shutil.copy(actual, tmp_path / "ladder.json")
    found = results.read_ladder(tmp_path)
    assert results.inputs_hash(found.fit.rungs, found.settings) == written["inputs_sha256"]
    point = found.fit.predict(written["parameters"], written["tokens"], seeds=written["seeds"])
    assert asdict(point.loss) == pytest.approx(written["loss"], rel=1e-4)

    score, at = json.loads(actual.read_text())["score"], written["loss"]
    assert score["seconds_after_prediction"] > 0
    assert score["inside_interval"] == (at["low"] <= statistics.mean(score["losses"]) <= at["high"])
    page = (REPOSITORY / "docs" / "scaling_laws.md").read_text()
    verdict = "inside" if score["inside_interval"] else "**outside**"
    assert f"| [{score['loss']:.3f}](ladders/{actual.name}), {verdict} |" in page
    width = score["half_width_percent"]
    assert f"| {at['value']:.3f} ({at['low']:.3f} ... {at['high']:.3f}), ± {width:.1f} % |" in page


LAW = Law(E=1.5, A=60.0, B=400.0, alpha=0.35, beta=0.4)


def small_ladder(**settings: Any) -> Ladder:
    """Return a ladder of exact losses, of the kind of gpt2-nano's job with other settings."""
    sizes = [(N, D) for N in (10**5, 3 * 10**5, 10**6) for D in (10**6, 4 * 10**6, 10**7)]
    rungs = [Rung(N, D, (LAW.loss(N, D), LAW.loss(N, D) * 1.002)) for N, D in sizes]
    job = job_for(model="gpt2-nano", tokens="1M", vocab_size=512)
    own = results.shared_settings(job.config) | {"data": "f" * 64, "data_name": "data/x"}
    return Ladder("mine", {**own, **settings}, fit_law(rungs))


def test_a_prediction_is_written_once_and_scored_by_its_moment(tmp_path: Path) -> None:
    found = small_ladder()
    point = found.fit.predict(4 * 10**6, 2 * 10**7, seeds=2)
    first = results.write_prediction(tmp_path, found, point)
    assert results.write_prediction(tmp_path, found, point) == first
    law = fit_law([*found.fit.rungs[:8], Rung(10**6, 10**7, (3.0,))])
    other = Ladder("mine", found.settings, law)
    with pytest.raises(CheckError, match="from other losses or for another top rung"):
        results.write_prediction(tmp_path, other, point)
    assert json.loads((tmp_path / results.PREDICTION).read_text()) == first
    loss = LAW.loss(4 * 10**6, 2 * 10**7)
    score = results.score(first, [loss, loss], first["time"] + 5)
    assert score["inside_interval"]
    assert abs(score["error_percent"]) < 0.5
    assert not results.score(first, [loss * 1.1], first["time"] + 5)["inside_interval"]
    with pytest.raises(CheckError, match="before its prediction was written"):
        results.score(first, [loss], first["time"] - 1)


@pytest.mark.parametrize("change", [None, {"time": "now"}, {"loss": {"value": 3.0}}, []], ids=str)
def test_a_damaged_prediction_is_one_line(change: Any, tmp_path: Path, wording) -> None:
    found, path = small_ladder(), tmp_path / results.PREDICTION
    point = found.fit.predict(4 * 10**6, 2 * 10**7, seeds=2)
    written = results.write_prediction(tmp_path, found, point)
    path.write_text(json.dumps(written | change if change else {} if change is None else [written]))
    with pytest.raises(ConfigError, check=wording):
        results.read_prediction(tmp_path)
    with pytest.raises(ConfigError):
        results.write_prediction(tmp_path, found, point)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of runs with a ladder of modern blocks named mine."""
    (tmp_path / "mine").mkdir()
    modern = job_for(model="modern-nano", tokens="1M", vocab_size=512)
    found = small_ladder(**results.shared_settings(modern.config))
    names = [f"r{i}" for i in range(9)]
    document = results.ladder_as_json(found, names=names, rates=[], prediction=None, scored=None)
    (tmp_path / "mine" / "ladder.json").write_text(json.dumps(document))
    return tmp_path


def estimated(folder: Path, *words: str) -> launch.Done:
    argv = [f"--checkpoint_dir={folder}", "--gpu=H100", "--ladder=mine", *words]
    return launch.call("estimate_time.py", *argv)


def test_a_ladder_predicts_the_loss_where_the_public_law_says_nothing(folder: Path) -> None:
    words = ["--model=modern-nano", "--vocab_size=512", "--tokens=20M"]
    said = launch.worked(estimated(folder, *words, "--json")).stdout
    document = json.loads(said)
    loss, N = document["loss"], document["model"]["parameters"]
    tokens = document["dataset_info"]["training_tokens"]
    assert loss["value"] == pytest.approx(LAW.loss(N, tokens), rel=0.005)
    assert loss["low"] < loss["value"] < loss["high"]
    assert (loss["law"], loss["data"]) == ("ladder mine", "data/x")
    _, said, _ = estimated(folder, *words, "--explain")
    assert "ladder mine on data/x, one new run" in said
    assert f"{loss['value']:.3f}" in said


@pytest.mark.parametrize(
    "words",
    [
        *("--model=gpt2-nano --vocab_size=512", "--model=modern-nano", "--ladder=none"),
        "--model=modern-nano --vocab_size=512 --optimizer=adamw",
        "--model=modern-nano --vocab_size=512 --context_length=64",
        "--model=modern-nano --vocab_size=512 --data_dir=DATA",
    ],
)
def test_a_ladder_of_another_kind_than_the_job_is_rejected(folder, tiny_data, words, wording):
    typed = words.replace("DATA", str(tiny_data)).split()
    wording(launch.rejected(estimated(folder, "--tokens=20M", *typed)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(('"data_name"', '"name_of_data"'), ('"tokens": 1000000,', '"tokens": "1M",')),
        ('"rungs": [', '"rungs": [1,'),
    ],
)
def test_a_damaged_ladder_is_one_line(folder: Path, old: str, new: str, wording) -> None:
    path = folder / "mine" / results.FILE
    path.write_text(path.read_text().replace(old, new))
    wording(launch.rejected(estimated(folder, "--model=modern-nano", "--vocab_size=512")))

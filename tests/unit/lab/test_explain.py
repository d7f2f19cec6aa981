"""`compare --explain` on real tiny runs: planted causes show where they are, and the parts add up to the whole."""

import dataclasses
import json
import random
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from scipy import special, stats

from corpora import run_prepare, write_jsonl
from gpt2lab.checkpoint import manifest
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override
from gpt2lab.data.mixture import validation_orders
from gpt2lab.data.order import Order
from gpt2lab.data.shards import open_data
from gpt2lab.data.windows import WindowReader
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.evaluation.results import checksums_of, choose_windows, hash_checksums, read_results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.finetuning.recipe import FineTuning
from gpt2lab.lab import explain as explaining
from gpt2lab.lab import token_groups, token_losses
from gpt2lab.lab.explain import explain, explain_losses, sentence
from gpt2lab.lab.stats import Estimates, Sums, estimate_groups
from gpt2lab.lab.token_losses import TokenLosses, find_token_losses, read_token_losses
from gpt2lab.report import plots
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.plain import BYTES
from launch import SCRIPTS, ask, call, events, train_in_forks, worked
from tiny import CONTEXT, flip_bit, parse, pretrain, write_shards

T = 16  # <|endoftext|> and 15 characters: each window begins with a document
STEPS = 60


def write_source(folder: Path, name: str, alphabet: str, seed: int) -> Path:
    """Prepare documents of four random characters and eleven that only their position tells: aabbaabbaab."""
    rng, (a, b, *_) = random.Random(seed), alphabet
    rest = 2 * (a + a + b + b) + a + a + b
    texts = ["".join(rng.choices(alphabet, k=4)) + rest for _ in range(900)]
    write_jsonl(folder / name / "texts.jsonl", texts)
    run_prepare(folder / name, folder / "data" / name, tokenizer=BYTES, val_tokens=3200)
    return folder / "data" / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs `both` and `letters`, which learns from one of two sources, and `blind`.

    `blind` is `both` without what it knows of positions.
    """
    folder = tmp_path_factory.mktemp("explain")
    letters = write_source(folder, "letters", string.ascii_lowercase[:12], 1)
    digits = write_source(folder, "digits", string.digits, 2)
    flags = [
        *("--n_layer=1", "--n_head=2", "--n_embd=32", f"--context_length={T}"),
        *("--data_dir", f"{letters}:0.5", f"{digits}:0.5", "--total_batch_size=512"),
        *("--mini_batch_size=32", f"--max_steps={STEPS}", "--eval_freq=0", "--sample_freq=0"),
        *("--checkpoint_freq=0", "--epoch_checkpoints=off", "--sample_tokens=1"),
        *("--max_lr=0.02", "--warmup_steps=10", "--val_tokens=6400"),
        *("--device=cpu", "--dtype=fp32", "--compile=off", "--shuffle=windows"),
        *(f"--checkpoint_dir={folder / 'runs'}", "--keep_token_losses"),
    ]
    pretrain(parse([*flags, "--run_name=both"]))
    pretrain(parse([*flags, "--run_name=letters", "--data_weights_at=512:1,0"]))
    blinded(folder / "runs" / "both", folder / "runs" / "blind")
    ask("evaluate.py", "blind", "--keep_token_losses", "--json", folder=folder)
    return folder


def blinded(run: Path, copy: Path) -> None:
    """Copy a run with one checkpoint whose embeddings of positions are zero."""
    step = manifest.folder_name(STEPS)
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns(step, "evaluations", "run.lock"))
    facts = manifest.read_manifest(run / step)
    files = {name: [(run / step / name).read_bytes()] for name in facts.pop("files")}
    weights = safetensors.torch.load(files["model.safetensors"][0])
    weights["wpe.weight"].zero_()
    files["model.safetensors"] = [safetensors.torch.save(weights)]
    facts = {k: v for k, v in facts.items() if k not in ("format", "manifest_sha256")}
    manifest.commit(copy, manifest.Draft(STEPS, files, facts))


def asked(folder: Path, a: str, b: str) -> dict[str, Any]:
    answer = ask("compare", a, b, "--explain", "--only=validation", "--json", folder=folder)
    return dict(answer["explain"])


def groups(found: dict[str, Any], by: str) -> dict[str, dict[str, Any]]:
    (split,) = (s for s in found["splits"] if s["by"].startswith(by))
    return {group["name"]: group for group in split["groups"]}


def test_parts_of_every_split_add_up_to_the_whole(folder: Path) -> None:
    words = ("both", "letters", "--explain", "--only=validation", "--json")
    answer = ask("compare", *words, folder=folder)
    found, whole = answer["explain"], answer["metrics"]["val_loss"]
    assert len(found["splits"]) == 6
    for split in found["splits"]:
        parts = sum(g["part"] for g in split["groups"])
        assert parts == pytest.approx(found["difference"], abs=1e-12)
        assert sum(g["tokens"] for g in split["groups"]) == pytest.approx(1, abs=1e-12)
        for g in split["groups"]:
            assert g["part"] == pytest.approx(g["tokens"] * g["mean"], abs=1e-12)
    # fp16 moved the whole by far less than its error, which is that of the losses by document.
    # Sources are strata in both, also where their differences are far apart, as here.
    assert whole["se"] == pytest.approx(found["difference_se"], rel=1e-3)
    assert found["exact_difference"] == pytest.approx(whole["difference"], rel=1e-9)
    assert abs(found["difference"] - whole["difference"]) < 0.01 * found["difference_se"]
    sources = groups(found, "source").values()
    strata = np.hypot(*(source["tokens"] * source["mean_se"] for source in sources))
    assert found["difference_se"] == pytest.approx(strata, rel=1e-9)
    assert (found["units"], found["unit"]) == (whole["n"], "document")


def test_a_model_blind_to_positions_shows_in_position_and_repetition(folder: Path) -> None:
    found = asked(folder, "both", "blind")
    assert found["difference"] > 0.3
    repeated = groups(found, "repetition")
    assert repeated["triple seen"]["stands_out"]
    assert repeated["triple seen"]["a"] < 0.01
    assert repeated["triple seen"]["mean"] > 2 * repeated["token new to the window"]["mean"]
    new = repeated["token new to the window"]
    assert new["stands_out"]
    assert new["part"] < 0.2 * found["difference"]
    places = groups(found, "position in the window")
    assert places["5 to 16"]["stands_out"]
    assert places["5 to 16"]["mean"] > 3 * places["2 to 4"]["mean"]
    digits = groups(found, "source")["digits"]
    assert digits["part"] == pytest.approx(0.5 * found["difference"], rel=0.1)
    assert found["sentence"].startswith("B is worse by ")
    assert "'5 to 16' (position in the window; 75% of the tokens, 9" in found["sentence"]


def test_a_model_of_one_source_shows_by_source(folder: Path) -> None:
    found = asked(folder, "both", "letters")
    sources = groups(found, "source")
    assert sources["digits"]["stands_out"]
    assert sources["digits"]["part"] > 0.9 * found["difference"] > 0.5
    assert sources["letters"]["mean"] < 0.1 * sources["digits"]["mean"]
    kinds = groups(found, "kind of text")
    assert set(kinds) == {"word in a line of prose", "digits", "end of a document, special"}
    assert kinds["digits"]["stands_out"]
    # Of a whole source, its own error is that of the source's losses by document.
    event = events(folder / "runs" / "both", "eval")[-1]
    assert sources["digits"]["a"] == pytest.approx(event["val_loss_by_source"]["digits"], rel=1e-4)


def test_kept_losses_are_those_of_the_evaluation(folder: Path) -> None:
    """fp16 is of the sums that were computed, and neither moves them nor is far from them."""
    run = folder / "runs" / "both"
    kept = find_token_losses("both", folder / "runs")
    event = events(run, "eval")[-1]
    assert kept.val_loss == event["val_loss"]
    assert (kept.step, kept.losses.dtype, kept.losses.shape) == (STEPS, np.float16, (400, T))
    results = read_results(run / "validation" / f"step_{STEPS:08d}.npz")
    by_document = kept.losses.astype(np.float64).sum(axis=1)  # a window is a document here
    exact = results.per_unit["val_loss"] * T
    assert np.abs(by_document - exact).max() < 2**-11 * exact.max()
    words = ("both", "--save=kept", "--keep_token_losses", "--json")
    again = ask("evaluate.py", *words, folder=folder)
    assert again["val_loss"] == event["val_loss"]
    saved = read_token_losses(folder / "kept")
    assert np.array_equal(saved.losses, kept.losses)
    assert saved.layout() == kept.layout()
    without = ask("evaluate.py", "both", "--save=plain", "--json", folder=folder)
    assert again.pop("token_losses") == str(folder / "kept" / "token_losses.npy")
    assert without == again
    assert not (folder / "plain" / "token_losses.npy").exists()


def test_a_run_that_ends_early_keeps_its_losses_one_stopped_says_how(tiny_flags, tmp_path):
    """At a rate of 3 the loss only grows: the run ends after two evaluations without a better one."""
    flags = [*tiny_flags, "--keep_token_losses", "--max_lr=3", "--sample_freq=0", "--max_steps=9"]
    flags += ["--eval_freq=1", "--warmup_steps=0", "--grad_clip=0"]
    pretrain(parse([*flags, "--early_stopping_patience=2", "--run_name=ended"]))
    (stop,) = events(tmp_path / "runs" / "ended", "stop")
    assert stop["reason"] == "early stopping"
    assert find_token_losses("ended", tmp_path / "runs").step == stop["step"] < 9
    pretrain(parse([*flags, "--stop_after_steps=2", "--run_name=stopped"]))
    with pytest.raises(DataError, match=r"evaluate.* stopped --keep"):
        find_token_losses("stopped", tmp_path / "runs")


def copied(folder: Path, to: Path) -> Path:
    source = folder / "runs" / "both" / "evaluations" / manifest.folder_name(STEPS)
    return Path(shutil.copytree(source, to))


def test_other_or_damaged_losses_are_rejected(folder: Path, tmp_path: Path) -> None:
    runs = folder / "runs"
    with pytest.raises(DataError, match=r"^nobody: .*evaluate"):
        (tmp_path / "nobody").mkdir()
        find_token_losses("nobody", tmp_path)
    bent = copied(folder, tmp_path / "bent") / "token_losses.npy"
    flip_bit(bent, 500)
    with pytest.raises(DataError, match=r"token_losses.npy: damaged .*--keep"):
        explain("both", str(bent.parent), checkpoint_dir=runs)
    facts = copied(folder, tmp_path / "facts") / "token_losses.json"
    facts.write_text(facts.read_text()[:-20])
    with pytest.raises(DataError, match=r"token_losses.json: not readable as JSON"):
        explain("both", str(facts.parent), checkpoint_dir=runs)
    words = ("both", "--val_tokens=640", "--keep_token_losses", "--json")
    ask("evaluate.py", *words, f"--save={tmp_path / 'fewer'}", folder=folder)
    with pytest.raises(DataError, match=r"are not of the same tokens \(other validation data"):
        explain("both", str(tmp_path / "fewer"), checkpoint_dir=runs)


def test_data_that_changed_or_are_gone_are_named(folder: Path, tmp_path: Path) -> None:
    """Each time both evaluations agree with each other, but not with the folder."""
    kept = find_token_losses("both", folder / "runs")

    def written(name: str, **changed: Any) -> str:
        facts = copied(folder, tmp_path / name) / "token_losses.json"
        content = json.loads(facts.read_text())
        for source in content["sources"]:
            source |= {key: f(source[key]) for key, f in changed.items()}
        facts.write_text(json.dumps(content))
        return str(facts.parent)

    moved = written("moved", folder=lambda path: f"{path}-gone")
    with pytest.raises(DataError, match="no longer exist; restore them, or evaluate both again"):
        explain(moved, moved, checkpoint_dir=folder / "runs")
    # One that still knows the folder is enough; and a run and itself differ nowhere.
    found = explain(moved, "both", checkpoint_dir=folder / "runs")
    assert (found.difference, found.difference_se) == (0, 0)
    said = explaining.describe_explanation(found)
    assert "which is within noise; no group of tokens differs" in said
    for name in ("fingerprint", "windows_sha256"):
        other = written(name, **{name: lambda digest: digest[::-1]})
        with pytest.raises(DataError, match="not the data of the token losses"):
            explain(other, other, checkpoint_dir=folder / "runs")
    assert kept.sources[0].windows == 200


def test_losses_of_weights_that_the_run_left_are_not_taken_and_none_kept_is_said(folder, tmp_path):
    run = tmp_path / "both"
    shutil.copytree(folder / "runs" / "both", run, ignore=shutil.ignore_patterns("run.lock"))
    log = run / "metrics.jsonl"
    begin = {"event": "begin", "time": 0.0, "attempt": 2, "step": STEPS - 1}
    begin |= {"max_steps": STEPS, "world_size": 1}
    log.write_text(log.read_text() + json.dumps(begin) + "\n")
    with pytest.raises(DataError, match="holds no token losses"):
        find_token_losses("both", tmp_path)
    code, line = ask("evaluate.py", "both", "--keep_token_losses", "--hellaswag", folder=folder)
    assert (code, "--keep_token_losses is for validation on token shards" in line) == (2, True)
    with pytest.raises(ConfigError, match="fine-tuning measures answers"):
        FineTuning().open_data(override(Config(), {"keep_token_losses": True}), None)


@pytest.mark.slow
def test_two_ranks_keep_what_one_does(folder: Path) -> None:
    flags = ["both", "--keep_token_losses", f"--checkpoint_dir={folder / 'runs'}", "--json"]
    for world in (1, 2):
        save = f"--save={folder / f'world{world}'}"
        worked(train_in_forks([*flags, save], world=world, program=SCRIPTS / "evaluate.py"))
    one, two = (read_token_losses(folder / f"world{world}") for world in (1, 2))
    assert np.array_equal(one.losses, two.losses)
    assert one.sources == two.sources


def test_some_windows_at_a_time_give_the_same_as_all(tmp_path, monkeypatch):
    """Shards of another program, in which no id marks documents: windows are the units, and one split is left out."""
    folder = write_shards(tmp_path / "data", train=(1003, 777), val=(650, 300))
    data = open_data(folder, vocab_size=None)
    (order,) = validation_orders(data, context_length=CONTEXT)
    reader = WindowReader(data.splits["val"], context_length=CONTEXT, id_limit=2**16)
    windows = reader.read(*order.locate(choose_windows(order, 50)))
    assert choose_windows(order, 50)[-1] == 49 * order.windows_per_epoch // 50, "spread over all"
    digest = hash_checksums(checksums_of(windows))
    source = token_losses.Source("data", str(folder), data.fingerprint, GPT2.hash, 1.0, 50, digest)
    rng = np.random.RandomState(0)
    drawn = (rng.exponential(3, (50, CONTEXT)).astype(np.float16) for _ in range(2))
    a, b = (TokenLosses(losses, 3.0, (source,)) for losses in drawn)
    whole = explain_losses(a, b)
    monkeypatch.setattr(explaining, "_TOKENS_AT_ONCE", 3 * CONTEXT)
    few = explain_losses(a, b)
    assert (whole.unit, whole.units, len(whole.splits)) == ("window", 50, 4)
    assert whole.left_out[0].startswith("position in the document: the data do not mark")
    assert few.splits[0].groups[0].part == pytest.approx(whole.splits[0].groups[0].part, rel=1e-12)
    assert few.difference == pytest.approx(whole.difference, rel=1e-12)
    assert not any(group.stands_out for split in whole.splits for group in split.groups)
    assert "within noise; no group of tokens differs" in sentence(whole)
    assert "within noise" in sentence(dataclasses.replace(whole, difference=9.0, p=0.25))
    mean = (b.losses.astype(float) - a.losses.astype(float)).mean(axis=1)
    assert whole.difference_se == pytest.approx(mean.std(ddof=1) / np.sqrt(50))
    assert whole.p == pytest.approx(stats.ttest_1samp(mean, 0).pvalue)


def test_repetition_is_that_of_a_search_through_the_window() -> None:
    windows = np.random.RandomState(0).randint(0, 5, (30, 25)).astype(np.uint16)
    expected = np.zeros((30, 24), int)
    for row, window in enumerate(windows.tolist()):
        for place in range(1, 25):
            for n in (1, 2, 3):
                gram = window[place - n + 1 : place + 1]
                starts = range(place - n + 1)
                if place >= n - 1 and any(window[i : i + n] == gram for i in starts):
                    expected[row, place - 1] = n
    assert np.array_equal(token_groups.by_repetition(windows), expected)


def test_places_go_on_from_shard_to_shard() -> None:
    """Two shards of 10: documents begin after places 3 and 7 of the first, and 4 of the second."""
    order = Order([10, 10], context_length=3, shuffle="none", seed=0)
    shards, offsets = order.locate(np.arange(order.windows_per_epoch))
    ends = [np.array([3, 7]), np.array([4])]
    found = token_groups.places_in_documents(ends, [10, 10], shards, offsets, 3)
    # Places 0 to 9: 1-4 | 1-4 | 1, 2, and on in the second shard: 3-7 | 1-5.
    assert found.tolist() == [[2, 3, 4], [1, 2, 3], [4, 1, 2], [4, 5, 6], [7, 1, 2], [3, 4, 5]]
    places = np.array([1, 16, 17, 99_999])
    assert token_groups.by_place(places, token_groups.IN_DOCUMENT).tolist() == [0, 0, 1, 6]


def test_frequencies_are_counts_per_million(folder: Path) -> None:
    data = open_data(folder / "data" / "digits", vocab_size=None)
    per_million = token_groups.count_training_tokens(data)
    ids = np.concatenate([np.load(shard.path) for shard in data.splits["train"]])
    assert per_million[ord("7")] == pytest.approx(1e6 * (ids == ord("7")).mean())
    table = np.array([0, 0.5, 1, 9, 10, 20_000])
    windows = np.array([[0, 0, 1, 2, 3, 4, 5, 6]])  # an id above all that occur: never seen
    assert token_groups.by_frequency(windows, table).tolist() == [[0, 1, 2, 2, 3, 6, 0]]


def test_kinds_of_text_follow_their_rules() -> None:
    text = "The cat sat, 12 days.\n    return x.y(3)\n"
    ids = [BYTES.end_of_text, *BYTES.encode(text), BYTES.end_of_text]
    found = token_groups.TextKinds(BYTES).group(np.array([ids]))[0].tolist()
    code = {"word": "c", "digits": "d", "punctuation": "p", "whitespace": " ", "end": "e"}
    marks = [code[name.partition(" ")[0]] for name in token_groups.KINDS]
    marks[0] = "w"
    assert "".join(marks[kind] for kind in found) == "www www wwwp dd wwwwp     cccccc cpcpdp e"


def documents(rng: np.random.Generator, count: int, effects: np.ndarray) -> Sums:
    """Return documents of different lengths whose tokens share an effect on B - A, and a mix of P groups each."""
    tokens = np.maximum(1, rng.lognormal(4, 0.8, count))
    shares = rng.dirichlet(3 * np.ones(len(effects)), count)
    cells = np.ceil(tokens[:, None] * shares)
    means = effects + rng.normal(0, 0.3, (count, 1)) + rng.normal(0, 0.1, cells.shape)
    return Sums(cells, np.ones_like(cells), cells * means)


def test_errors_are_those_of_the_jackknife_over_documents() -> None:
    one = documents(np.random.default_rng(0), 30, np.array([0.1, -0.2, 0.0]))
    found = estimate_groups([one], [1.0])
    n = one.tokens.sum(axis=1)
    for g in range(3):
        part = estimate_mean(one.difference[:, g] / n, n)
        mean = estimate_mean(one.difference[:, g] / one.tokens[:, g], one.tokens[:, g])
        assert (found.part.value[g], found.part.se[g]) == pytest.approx((part.mean, part.se))
        assert (found.mean.value[g], found.mean.se[g]) == pytest.approx((mean.mean, mean.se))
    single = estimate_groups([Sums(one.tokens[:1], one.a[:1], one.difference[:1])], [1.0])
    assert np.isnan(single.part.se).all()


@pytest.mark.parametrize(
    ("seed", "counts", "shares", "times", "rate"),
    [
        *((1, (50,), [1.0], 2500, 0.95), (1, (50, 40), [0.6, 0.4], 2500, 0.95)),
        (7, (8, 300), [0.5, 0.5], 800, 0.955),
    ],
)
def test_true_parts_lie_in_two_errors_as_often_as_they_should(seed, counts, shares, times, rate):
    """95 % nominal; errors that count tokens would cover far less.

    In the last, eight documents weigh as much as 300: with pooled degrees of freedom the intervals held the truth in
    91 to 93 %.
    """
    rng, effects = np.random.default_rng(seed), np.array([0.1, -0.2, 0.0])
    truth = estimate_groups([documents(rng, 100_000, effects)], [1.0])
    hits: dict[str, list[np.ndarray]] = {"mean": [], "part": [], "excess": []}
    naive = []
    for _ in range(times):
        sources = [documents(rng, count, effects) for count in counts]
        found = estimate_groups(sources, shares)
        for name, found_inside in hits.items():
            one: Estimates = getattr(found, name)
            margin = special.stdtrit(one.degrees, 0.975) * one.se
            found_inside.append(np.abs(one.value - getattr(truth, name).value) < margin)
        by_token = 0.32 / np.sqrt(sources[0].tokens.sum(axis=0))
        naive.append(np.abs(found.mean.value - truth.mean.value) < 2 * by_token)
    for name, found_inside in hits.items():
        assert np.mean(found_inside) == pytest.approx(rate, abs=0.015), name
    assert len(counts) > 1 or np.mean(naive) < 0.5


def test_degrees_of_freedom_are_those_of_each_group() -> None:
    """As `estimate_mean` of the part has them where all documents are alike; 0 where one document has a group."""
    rng = np.random.default_rng(3)
    one = Sums(np.full((5, 2), 10.0), np.ones((5, 2)), rng.normal(size=(5, 2)))
    two = Sums(np.full((40, 2), 10.0), np.ones((40, 2)), rng.normal(size=(40, 2)))
    found = estimate_groups([one, two], [0.3, 0.7])
    for g in range(2):
        values = np.concatenate([one.difference[:, g], two.difference[:, g]]) / 20
        weights = np.repeat([0.3 / 5, 0.7 / 40], [5, 40])
        known = estimate_mean(values, weights, (slice(0, 5), slice(5, 45)))
        assert found.part.degrees[g] == pytest.approx(known.degrees)
    assert estimate_groups([one], [1.0]).part.degrees == pytest.approx([4, 4])
    one.tokens[1:, 0] = 0
    one.difference[1:, 0] = 0
    assert estimate_groups([one, two], [0.3, 0.7]).part.degrees[0] == 0


def test_a_picture_shows_every_group_of_every_split(tmp_path: Path, folder: Path) -> None:
    answer = ask("compare", "both", "letters", "--explain", "--json", folder=folder)
    (tmp_path / "it.json").write_text(json.dumps(answer))
    groups = [g for split in answer["explain"]["splits"] for g in split["groups"]]
    known = [g for g in groups if g["part_low"] is not None]
    assert known
    for one in known:
        assert (one["part_low"] + one["part_high"]) / 2 == pytest.approx(one["part"], abs=1e-12)
        assert one["part_high"] - one["part"] > 1.9 * one["part_se"]
    worked(call("plot", "--compare", tmp_path / "it.json", f"--out={tmp_path / 'it.svg'}"))
    picture = (tmp_path / "it.svg").read_text()
    for name in (*(g["name"] for g in groups), "source", "A  both    B  letters"):
        assert f"<!-- {name}" in picture
    plain = '{"a": "x", "b": "y", "metrics": {"val_loss": {"difference": 0.1}}}'
    other, picture = tmp_path / "other.json", tmp_path / "other.png"
    done = call("plot", "--compare", other)
    assert "other.json: no comparison with intervals (No such file or directory); " in done.stderr
    for text, why in ((plain, "it lacks 'over_units'"), ("[]", "another shape"), ("a", "not JSON")):
        other.write_text(text)
        with pytest.raises(ConfigError, match=rf"other.json: no comparison with .*\({why}\); "):
            plots.draw_table("compare", other, picture, plots.View())
    assert not picture.exists()

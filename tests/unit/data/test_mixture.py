"""A mixture is a function of the sample number: exact counts, close in every prefix, and nothing to remember."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

from corpora import TEXTS, run_prepare, write_jsonl
from edited_manifests import edit
from gpt2lab.config.mixture import read_sources
from gpt2lab.config.schema import Config, DataConfig
from gpt2lab.config.settings import override
from gpt2lab.data import mixture as mixing
from gpt2lab.data.mixture import PATTERN, Mixture, build_pattern, count_places, training_order
from gpt2lab.data.order import Order
from gpt2lab.data.shards import TokenData
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.tokenizers.plain import BYTES
from tiny import VOCAB, write_shards

T = 16
MANY = 2_000_000
WEIGHTS = {
    **{"the issue's": (0.7, 0.25, 0.05), "two": (0.9, 0.1), "equal": (1, 1, 1)},
    **{"one large, many small": (0.5, *[0.02] * 25), "four falls": (8, 4, 2, 1)},
    **{"as small as may be": (PATTERN - 1, 1), "one alone": (0, 3, 0)},
}
SIZES = ((1003, 777, 1290), (400,), (900, 250))  # tokens of the training shards of three sources


def order_of(data: TokenData, shuffle: str) -> Order | Mixture:
    settings = {"context_length": T, "shuffle": shuffle, "seed": 7}
    return training_order(data, override(Config(), settings))


def orders(*, shuffle: str = "windows") -> list[Order]:
    return [
        Order(list(sizes), context_length=T, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        for seed, sizes in enumerate(SIZES)
    ]


def mixture(*phases: tuple[int, tuple[float, ...]]) -> Mixture:
    counted = [(first, count_places(weights).tolist()) for first, weights in phases]
    return Mixture(orders(), counted, names="abc")


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    """Return three folders of one shape, so that equal orders would show."""
    sizes = {"train": (500, 700, 600, 800), "val": (300,)}
    return {name: write_shards(tmp_path / name, **sizes) for name in "abc"}


def opened(*words: object, at: tuple[str, ...] = (), vocab_size: int = VOCAB) -> TokenData:
    data = DataConfig(data_dir=tuple(map(str, words)), data_weights_at=at)
    return mixing.open_sources(read_sources(data), vocab_size=vocab_size)


def test_what_is_left_goes_to_the_largest_remainders():
    assert count_places((0.7, 0.25, 0.05)).tolist() == [2867, 1024, 205]  # 2867.2, 1024, 204.8
    assert count_places((1, 1, 1)).tolist() == [1366, 1365, 1365]
    assert count_places((14, 5, 1)).tolist() == [2867, 1024, 205], "weights are relative"


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_no_prefix_of_two_million_samples_is_off_by_a_sample(weights):
    """So that a pattern has the exact counts."""
    counts = count_places(weights)
    assert counts.sum() == PATTERN
    assert (np.abs(counts - np.array(weights) / sum(weights) * PATTERN) < 1).all()
    same = [Order([100], context_length=T, shuffle="none", seed=0)] * len(weights)
    sources, _ = Mixture(same, [(0, counts)], names=[""] * len(weights)).divide(np.arange(MANY))
    n, m = np.arange(1, MANY + 1), np.count_nonzero(counts)
    bound = 1 - 1 / (2 * m - 2) if m > 1 else 0  # Tijdeman's, in 1 / PATTERN exact
    for source, k in enumerate(counts.tolist()):
        off = PATTERN * np.cumsum(sources == source) - n * k
        assert np.abs(off).max() <= bound * PATTERN


PHASES = (
    [(0, WEIGHTS["the issue's"])],
    [(0, (0.7, 0.3, 0)), (1111, (0.1, 0.1, 0.8)), (1500, (0, 1, 0)), (9000, (1, 1, 1))],
)


@pytest.mark.parametrize("phases", PHASES, ids=["weights that stay", "weights that change"])
def test_samples_are_those_of_a_walk_that_counts(phases):
    """Each source is taken from its beginning without a gap or a repeat, through all phases."""
    mixed, own = mixture(*phases), orders()
    first_shard = [0, 3, 4]
    patterns = [build_pattern(count_places(weights)) for _, weights in phases]
    begins = [first for first, _ in phases]
    taken, expected = [0, 0, 0], []
    for sample in range(12_000):
        phase = max(i for i, first in enumerate(begins) if first <= sample)
        source = int(patterns[phase][(sample - begins[phase]) % PATTERN])
        if sample % 500 == 0:
            assert (mixed.counts_before(sample).tolist(), mixed.phase_of(sample)) == (taken, phase)
        expected.append((source, taken[source]))
        taken[source] += 1
    sources, numbers = mixed.divide(np.arange(12_000))
    assert list(zip(sources.tolist(), numbers.tolist(), strict=True)) == expected
    shards, offsets = mixed.locate(np.arange(12_000))
    shuffled = np.random.RandomState(0).permutation(12_000)
    assert np.array_equal(mixed.locate(shuffled), (shards[shuffled], offsets[shuffled]))
    for sample in range(0, 12_000, 61):
        assert np.array_equal(mixed.locate(np.array([sample]))[0], shards[[sample]]), "alone too"
        source, number = expected[sample]
        (shard,), (offset,) = own[source].locate(np.array([number]))
        assert (shards[sample], offsets[sample]) == (shard + first_shard[source], offset)


def test_epochs_are_counted_for_each_source():
    mixed = mixture(*PHASES[0])
    sources, _ = mixed.divide(np.arange(5000))
    windows = [order.windows_per_epoch for order in mixed.orders]
    counts = np.bincount(sources, minlength=3)
    assert mixed.epochs_before(5000) == dict(zip("abc", counts / windows, strict=True))
    assert mixed.windows_per_epoch == sum(windows)
    assert [mixed.epoch_of(sum(windows) + d) for d in (-1, 0)] == [0, 1]


def test_one_folder_is_no_mixture(folders):
    data = opened(folders["a"])
    order = order_of(data, "shards")
    plain = Order([500, 700, 600, 800], context_length=T, shuffle="shards", seed=7)
    assert type(data) is TokenData
    assert isinstance(order, Order)
    samples = np.arange(5 * plain.windows_per_epoch)
    assert np.array_equal(order.locate(samples), plain.locate(samples))


@pytest.mark.parametrize("shuffle", ["shards", "windows"])
def test_sources_of_one_size_shuffle_differently(folders, shuffle):
    data = opened(f"{folders['a']}:1", f"{folders['b']}:1")
    order = order_of(data, shuffle)
    a, b = order.orders
    second = np.arange(a.windows_per_epoch, 2 * a.windows_per_epoch)
    assert not np.array_equal(a.locate(second), b.locate(second))


def test_the_shards_of_all_sources_are_in_one_row(folders):
    data = opened(f"{folders['b']}:1", f"{folders['a']}:3")
    assert [s.path.parent.name for s in data.splits["train"]] == ["b"] * 4 + ["a"] * 4
    order = order_of(data, "none")
    samples = np.arange(500)
    names = [data.splits["train"][shard].path.parent.name for shard in order.locate(samples)[0]]
    assert names == [order.names[source] for source in order.divide(samples)[0]]


def test_the_fingerprint_is_of_folders_weights_and_changes(folders):
    write_shards(folders["b"], train=(500, 700, 600, 801), val=(300,))
    a, b, c = folders.values()
    found = {
        data.fingerprint
        for data in (
            opened(a),
            opened(f"{a}:1", f"{b}:1"),
            opened(f"{b}:1", f"{a}:1"),  # other seeds
            *(opened(f"{a}:2", f"{b}:1"), opened(f"{a}:1", f"{b}:1", at=("1000:1,2",))),
            *(opened(f"{a}:1", f"{b}:1", at=("1016:1,2",)), opened(f"{a}:1", f"{b}:1", f"{c}:1")),
        )
    }
    assert len(found) == 7
    assert opened(f"{a}:0.5", f"{b}:0.5").fingerprint == opened(f"{a}:1", f"{b}:1").fingerprint


def test_weights_change_at_the_first_window_past_the_token(folders):
    words = (f"{folders['a']}:1", f"{folders['b']}:0")
    for tokens, first in ((160, 10), (161, 11), (176, 11)):
        data = opened(*words, at=(f"{tokens}:0,1",))
        order = order_of(data, "none")
        sources, numbers = order.divide(np.arange(20))
        assert sources.tolist() == [0] * first + [1] * (20 - first)
        assert numbers.tolist() == [*range(first), *range(20 - first)]


def test_folders_and_weights_that_cannot_be_mixed_are_one_line(folders):
    link = folders["a"].parent / "link"
    link.symlink_to(folders["a"])
    for other, says in (
        (f"{folders['b']}:1e-5", "b: its weight 1e-05 is too small a part"),
        (f"{link}:1", "link: given twice"),
    ):
        with pytest.raises(ConfigError, match=says):
            opened(f"{folders['a']}:1", other)
    with pytest.raises(DataError, match="no such data folder; a weight needs several"):
        opened(f"{folders['a']}:0.7")
    named = folders["a"].rename(folders["a"].parent / "a:0.7")
    assert opened(named).folder == named


def test_a_short_shard_is_named_with_its_folder(folders):
    write_shards(folders["b"], train=(500, 9), val=(300,))
    data = opened(f"{folders['a']}:1", f"{folders['b']}:1")
    with pytest.raises(DataError, match=r"/b, train shard 1: 9 tokens hold no window"):
        order_of(data, "none")


def test_other_tokenizers_do_not_mix(folders, tmp_path):
    texts = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    for name in "bc":
        shutil.rmtree(folders[name])
        run_prepare(texts, folders[name], tokenizer=BYTES)
    for one, other in ("ab", "ca"):
        with pytest.raises(DataError, match=f"{folders[other].parent}"):
            opened(f"{folders[one]}:1", f"{folders[other]}:1", vocab_size=384)
    mixed = opened(f"{folders['b']}:1", f"{folders['c']}:1", vocab_size=384)
    assert isinstance(mixed, mixing.MixedData)
    for name in "bc":
        edit(folders[name], lambda m: m.update(tokenizer={"name": "unknown", "sha256": None}))
    for one, other in itertools.permutations("abc", 2):
        with pytest.raises(DataError, match="tokenizer"):
            opened(f"{folders[one]}:1", f"{folders[other]}:1", vocab_size=384)

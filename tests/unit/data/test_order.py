"""The order of samples: every window once per epoch, the same on any number of processes, forever."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpt2lab.config.derived import BatchPlan
from gpt2lab.data.loader import GlobalBatch, Loader
from gpt2lab.data.order import Order, Shuffle
from gpt2lab.data.shards import Shard, open_shard
from gpt2lab.data.windows import WindowReader
from gpt2lab.errors import DataError
from tiny import CONTEXT, VOCAB, make_tokens

SHUFFLES: tuple[Shuffle, ...] = ("shards", "windows", "none")
SIZES = (1003, 777, 1290, 18, 345)
SAMPLES = 24  # of one optimizer step in the loader's tests

Place = tuple[int, int]  # (shard, offset)

repeatable = settings(derandomize=True, max_examples=60, deadline=None)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[int], int]:
    """Draw (tokens of each shard, context length), every shard with at least one window."""
    context = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(context + 1, 8 * context + 3), min_size=1, max_size=9))
    return sizes, context


def visited(order: Order, epoch: int) -> list[Place]:
    """Return what an epoch visits, asked for in one call."""
    first = epoch * order.windows_per_epoch
    shards, offsets = order.locate(np.arange(first, first + order.windows_per_epoch))
    return list(zip(shards.tolist(), offsets.tolist(), strict=True))


def reference_epoch(
    sizes: list[int], context: int, shuffle: Shuffle, seed: int, epoch: int, rounds: int = 8
) -> list[Place]:
    """Write an epoch down window by window, with plain Python integers."""
    # A window of T + 1 tokens fits while at + context < size.
    starts = [range(0, size - context, context) for size in sizes]
    disk = [(shard, at) for shard, of_shard in enumerate(starts) for at in of_shard]
    if shuffle == "windows":
        return [disk[reference_place(i, len(disk), seed, epoch, rounds)] for i in range(len(disk))]
    shards = list(range(len(sizes)))
    if shuffle == "shards" and epoch > 0:
        shards = np.random.RandomState([seed, epoch]).permutation(len(sizes)).tolist()
    return [place for shard in shards for place in disk if place[0] == shard]


def reference_place(index: int, size: int, seed: int, epoch: int, rounds: int) -> int:
    """Walk a Feistel network until it lands inside; Python integers cannot overflow."""
    half = 1
    while 4**half < size:
        half += 1
    words = np.random.RandomState((seed, epoch)).randint(0, 2**32, size=rounds, dtype=np.uint64)
    keys = words.tolist()
    while True:
        left, right = divmod(index, 2**half)
        for key in keys:
            word = (right + key) * 0x9E3779B97F4A7C15 % 2**64
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (word ^ word >> 31) % 2**half
        index = left * 2**half + right
        if index < size:
            return index


@example(corpus=([17], 1), shuffle="windows", seed=1, epoch=1, version=(2, 8))  # 4**2 windows
@repeatable
@given(
    corpora(),
    st.sampled_from(SHUFFLES),
    st.integers(0, 2**32 - 1),
    st.integers(0, 4),
    st.sampled_from([(1, 4), (2, 8)]),
)
def test_an_epoch_equals_the_reference_in_plain_integers(corpus, shuffle, seed, epoch, version):
    sizes, context = corpus
    number, rounds = version
    order = Order(sizes, context_length=context, shuffle=shuffle, seed=seed, version=number)
    found = visited(order, epoch)
    assert found == reference_epoch(sizes, context, shuffle, seed, epoch, rounds)
    assert len(set(found)) == order.windows_per_epoch == len(found), "no token is a target twice"
    assert order.unused_targets == sum((size - 1) % context for size in sizes)


@pytest.mark.parametrize(("size", "epochs"), [(64, 2000), (1000, 400), (4096, 200)])
def test_neighbours_stay_neighbours_as_often_as_by_chance(size, epochs):
    """Of a random permutation 2 pairs in an epoch, with a variance of 2 (Kaplansky 1945); four rounds had up to 2.7."""
    order = Order([size + 1], context_length=1, shuffle="windows", seed=1)
    pairs = 0
    for epoch in range(epochs):
        _, offsets = order.locate(np.arange(epoch * size, (epoch + 1) * size))
        pairs += int((np.abs(np.diff(offsets)) == 1).sum())
    expected = 2 * (size - 1) / size * epochs
    assert abs(pairs - expected) < 4 * math.sqrt(2 * epochs)


@repeatable
@given(corpora(), st.sampled_from(SHUFFLES), st.integers(0, 999), st.data())
def test_a_sample_is_the_same_whichever_others_are_asked_for_with_it(corpus, shuffle, seed, data):
    sizes, context = corpus
    order = Order(sizes, context_length=context, shuffle=shuffle, seed=seed)
    sequence = [place for epoch in range(3) for place in visited(order, epoch)]
    numbers = data.draw(st.lists(st.integers(0, len(sequence) - 1), max_size=20))
    shards, offsets = order.locate(np.array(numbers, dtype=np.int64))
    found = list(zip(shards.tolist(), offsets.tolist(), strict=True))
    assert found == [sequence[number] for number in numbers]
    per_epoch = len(sequence) // 3
    assert [order.epoch_of(number) for number in numbers] == [n // per_epoch for n in numbers]


@pytest.mark.parametrize("tokens", [0, 1, 16])
def test_a_shard_without_a_window_is_rejected_by_its_number(tokens):
    with pytest.raises(DataError, match=rf"shard 1: {tokens} tokens .*context_length 16"):
        Order([100, tokens, 100], context_length=16, shuffle="shards", seed=0)


def test_frozen_shard_permutation():
    # A change here means that resumed runs would train on other tokens than they would have.
    order = Order([100] * 7, context_length=10, shuffle="shards", seed=1337)
    orders = ["".join(map(str, order.shard_order(epoch))) for epoch in range(4)]
    assert orders == ["0123456", "0314526", "6053214", "3456201"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> tuple[Shard, ...]:
    folder = tmp_path_factory.mktemp("order")
    paths = [folder / f"tiny_train_{index:06d}.npy" for index in range(len(SIZES))]
    for index, (path, size) in enumerate(zip(paths, SIZES, strict=True)):
        np.save(path, make_tokens(size, seed=index))
    return tuple(open_shard(path) for path in paths)


def windows_by_hand(shards: tuple[Shard, ...], shuffle: Shuffle, first: int, last: int) -> list:
    """Return windows [first, last) of the endless sequence, cut out of whole arrays."""
    arrays = [np.load(Path(shard.path)) for shard in shards]
    sizes = [len(array) for array in arrays]
    sequence: list[Place] = []
    epoch = 0
    while len(sequence) < last:
        sequence += reference_epoch(sizes, CONTEXT, shuffle, 1337, epoch)
        epoch += 1
    places = sequence[first:last]
    return [arrays[shard][at : at + CONTEXT + 1].tolist() for shard, at in places]


def fetch_all(
    shards: tuple[Shard, ...], shuffle: Shuffle, *, world: int, mini_batch: int, first: int
) -> list[GlobalBatch]:
    """Return every process's share of the global batch that starts at sample `first`."""
    plan = BatchPlan(SAMPLES, mini_batch, SAMPLES // (world * mini_batch), world, CONTEXT)
    order = Order(list(SIZES), context_length=CONTEXT, shuffle=shuffle, seed=1337)
    shares = []
    for rank in range(world):
        reader = WindowReader(shards, context_length=CONTEXT, id_limit=VOCAB)
        loader = Loader(order, reader, plan, rank=rank, device=torch.device("cpu"))
        shares.append(loader.fetch(first))
        reader.close()
    return shares


CUTS = [(1, 1), (1, 24), (2, 3), (2, 12), (3, 2), (4, 6), (8, 3), (12, 2), (24, 1)]


@pytest.mark.parametrize(("world", "mini_batch"), CUTS)
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_processes_share_the_same_samples_in_one_global_order(shards, shuffle, world, mini_batch):
    """And each share says what is true of the whole batch."""
    accumulation, windows = SAMPLES // (world * mini_batch), sum((s - 1) // CONTEXT for s in SIZES)
    lasts = [i == accumulation - 1 for _ in range(world) for i in range(accumulation)]
    for step in (1, 9, 10, 40):  # step 9 crosses into the second epoch
        first, last = (step - 1) * SAMPLES, step * SAMPLES
        expected = windows_by_hand(shards, shuffle, first, last)
        shares = fetch_all(shards, shuffle, world=world, mini_batch=mini_batch, first=first)
        micros = [micro for share in shares for micro in share.micro_batches]
        seen = [
            [*row.tolist(), target_row.tolist()[-1]]
            for micro in micros
            for row, target_row in zip(micro.tokens, micro.targets, strict=True)
        ]
        assert seen == expected
        digest = hashlib.sha256(np.array(expected).astype("<u2").tobytes()).hexdigest()
        assert [share.hash for share in shares] == [digest, *[None] * (world - 1)]
        assert [micro.index for micro in micros] == list(range(SAMPLES // mini_batch))
        assert [micro.is_last for micro in micros] == lasts
        for micro in micros:
            assert micro.tokens.shape == micro.targets.shape == (mini_batch, CONTEXT)
            assert torch.equal(micro.tokens[:, 1:], micro.targets[:, :-1])  # targets are one ahead
        for share in shares:
            assert (share.num_targets, share.samples) == (SAMPLES * CONTEXT, SAMPLES)
            assert (share.first_sample, share.epoch) == (first, first // windows)


def test_the_stream_of_batches_is_the_fetched_ones_in_a_row(shards):
    plan = BatchPlan(SAMPLES, 6, 4, 1, CONTEXT)
    order = Order(list(SIZES), context_length=CONTEXT, shuffle="windows", seed=1337)
    reader = WindowReader(shards, context_length=CONTEXT, id_limit=VOCAB)
    stream = Loader(order, reader, plan, rank=0, device=torch.device("cpu")).batches(48)
    hashes = [next(stream).hash for _ in range(12)]
    stream.close()
    how = {"world": 1, "mini_batch": 6}
    firsts = (48 + i * SAMPLES for i in range(12))
    fetched = [fetch_all(shards, "windows", first=first, **how)[0].hash for first in firsts]
    assert (hashes, len(set(hashes))) == (fetched, 12)

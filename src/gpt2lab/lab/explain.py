"""Where the difference of two evaluations comes from: B - A split by kind and position of the tokens. No torch.

A group's part of the difference is the sum over its tokens divided by the number of all tokens, so that the parts of a
split add up to the whole. Standard errors are over documents, as those of the losses are.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt2lab import fmt
from gpt2lab.data.mixture import validation_orders
from gpt2lab.data.shards import TokenData, document_marks, open_data
from gpt2lab.data.windows import WindowReader
from gpt2lab.errors import DataError
from gpt2lab.evaluation.results import checksums_of, choose_windows, divide_windows, hash_checksums
from gpt2lab.lab import stats, token_groups
from gpt2lab.lab.token_losses import Source, TokenLosses, find_token_losses
from gpt2lab.runs.events import finite

_TOKENS_AT_ONCE = 1 << 18
_MOST_NAMED = 3  # groups in the sentence


@dataclass(frozen=True)
class Group:
    """One group of a split, in nats/token; an error is None if a single document decides it."""

    name: str
    tokens: float  # share of all tokens, by the weights of a mixture
    a: float
    b: float
    mean: float  # b - a
    mean_se: float | None
    part: float  # tokens * mean: the parts of a split add up to the difference
    part_se: float | None
    part_low: float | None  # its 95 % interval; None if fewer than two documents decide it
    part_high: float | None
    excess: float  # part - tokens * difference: what the group contributes beyond its size
    excess_se: float | None
    stands_out: bool  # its excess is beyond noise


@dataclass(frozen=True)
class Split:
    """All tokens, divided one way; groups without a token are left out."""

    by: str
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Explanation:
    """The difference of two evaluations and where it comes from."""

    step_a: int | None
    step_b: int | None
    tokens: int
    units: int
    unit: str  # document or window
    difference: float  # of the kept losses, nats/token: what the parts of each split add up to
    difference_se: float | None
    p: float | None  # of no difference, by document as the losses are tested; None for a single one
    exact_difference: float  # before the losses were rounded to fp16
    splits: tuple[Split, ...]
    left_out: tuple[str, ...]  # splits that are impossible with these data, and why


def explain(name_a: str, name_b: str, *, checkpoint_dir: Path) -> Explanation:
    """Split the difference B - A of the token losses of two evaluations.

    Raises: DataError if one has none, they are not of the same tokens, or the tokens no longer exist.
    """
    a, b = (find_token_losses(name, checkpoint_dir) for name in (name_a, name_b))
    if a.layout() != b.layout():
        raise DataError(
            f"the token losses of {name_a} and {name_b} are not of the same tokens (other validation data, "
            f"--val_tokens, context length or weights of a mixture); evaluate both alike with --keep_token_losses"
        )
    return explain_losses(a, b)


class _Windows:
    """The windows of one source, as they were measured."""

    def __init__(self, number: int, source: Source, other: Source, T: int) -> None:
        """`number`: of the source, from 0; `other`: the same windows, whose folder may be elsewhere."""
        folder = next((f for f in (source.folder, other.folder) if Path(f).is_dir()), None)
        if folder is None:
            raise DataError(
                f"{source.folder}: the data of the token losses no longer exist; restore them, or evaluate both "
                f"again with --val DIR --keep_token_losses"
            )
        self.number, self.source, self.folder, self.T = number, source, folder, T
        self.data = open_data(Path(folder), vocab_size=None)
        if self.data.fingerprint != source.fingerprint:
            raise self.changed()
        self.shards = self.data.splits["val"]
        ids = 2**32 if self.data.tokenizer is None else self.data.tokenizer.size
        self.reader = WindowReader(self.shards, context_length=T, id_limit=ids)
        (order,) = validation_orders(self.data, context_length=T)
        samples = choose_windows(order, source.windows)
        self.ends = [document_marks(shard, self.data.end_of_text.id) for shard in self.shards]
        self.shard, self.offset = order.locate(samples)
        parts = divide_windows(order, samples, self.ends)
        unit = np.repeat(parts.unit.astype(np.int32), parts.end - parts.begin)
        self.unit = unit.reshape(len(samples), T)
        self.kind = parts.kind

    def places_in_documents(self, rows: slice) -> np.ndarray:
        """Group the targets of some windows, (n, T), by their places in documents."""
        tokens = [shard.tokens for shard in self.shards]
        places = token_groups.places_in_documents(
            self.ends, tokens, self.shard[rows], self.offset[rows], self.T
        )
        return token_groups.by_place(places, token_groups.IN_DOCUMENT)

    def changed(self) -> DataError:
        return DataError(
            f"{self.folder}: not the data of the token losses; restore those, or evaluate both again with "
            f"--keep_token_losses"
        )


@dataclass(frozen=True)
class _Chunk:
    """Some windows of one source: ids, (n, T + 1), and their rows in it."""

    of: _Windows
    rows: slice
    windows: np.ndarray


# By what tokens are divided: the names of the groups, and the group of each target of a chunk, (n, T).
_Groupings = dict[str, tuple[tuple[str, ...], Callable[[_Chunk], np.ndarray]]]


def _groupings(opened: list[_Windows], T: int) -> tuple[_Groupings, list[str]]:
    """Return the ways to divide tokens, and why others are left out."""
    tokenizer, left_out = opened[0].data.tokenizer, []
    frequencies = _mix([one.data for one in opened], [one.source.weight for one in opened])
    in_window = token_groups.by_place(np.arange(1, T + 1), token_groups.window_bounds(T))
    found: _Groupings = {
        "frequency of the token in the training shards": (
            token_groups.FREQUENCIES,
            lambda chunk: token_groups.by_frequency(chunk.windows, frequencies),
        ),
        "position in the window: tokens before it": (
            token_groups.window_places(T),
            lambda chunk: np.broadcast_to(in_window, (len(chunk.windows), T)),
        ),
    }
    if all(one.kind == "document" for one in opened):
        found["position in the document"] = (
            token_groups.DOCUMENT_PLACES,
            lambda chunk: chunk.of.places_in_documents(chunk.rows),
        )
    else:
        left_out.append(
            "position in the document: the data do not mark the end of documents, or have only one"
        )
    found["repetition of earlier text in the window"] = (
        token_groups.REPETITIONS,
        lambda chunk: token_groups.by_repetition(chunk.windows),
    )
    try:
        if tokenizer is None:
            raise DataError("the tokenizer of the data is unknown")
        kinds = token_groups.TextKinds(tokenizer)
        found["kind of text"] = (token_groups.KINDS, lambda chunk: kinds.group(chunk.windows))
    except DataError as error:
        left_out.append(f"kind of text: {error}")
    if len(opened) > 1:
        found["source"] = (
            tuple(one.source.name for one in opened),
            lambda chunk: np.full((len(chunk.windows), T), chunk.of.number, np.uint8),
        )
    return found, left_out


def _mix(data: list[TokenData], weights: list[float]) -> np.ndarray:
    """Return the occurrences of each id per million training tokens of a mixture."""
    counts = [token_groups.count_training_tokens(one) for one in data]
    mixed = np.zeros(max(map(len, counts)))
    for count, weight in zip(counts, weights, strict=True):
        mixed[: len(count)] += weight * count
    return mixed


def explain_losses(a: TokenLosses, b: TokenLosses) -> Explanation:
    """Split B - A of two evaluations of the same tokens, with a chunk of windows in memory at a time.

    Raises: DataError if the tokens no longer exist.
    """
    T = a.losses.shape[1]
    pairs = enumerate(zip(a.sources, b.sources, strict=True))
    opened = [_Windows(number, *pair, T) for number, pair in pairs]
    groupings, left_out = _groupings(opened, T)
    units = [int(one.unit.max()) + 1 for one in opened]
    sums = [
        [np.zeros((3, count, len(names))) for count in units] for names, _ in groupings.values()
    ]
    for chunk, losses in _chunks(opened, a, b):
        unit = chunk.of.unit[chunk.rows]
        for (names, group), of_sources in zip(groupings.values(), sums, strict=True):
            into, P = of_sources[chunk.of.number], len(names)
            cell = (unit * P + group(chunk)).ravel()
            for row, values in enumerate(losses):
                into[row] += np.bincount(cell, values, minlength=into[row].size).reshape(-1, P)
    weights = [source.weight for source in a.sources]
    found = [stats.estimate_groups([stats.Sums(*one) for one in of], weights) for of in sums]
    # A group of all tokens.
    in_one = [stats.Sums(*one.sum(axis=2, keepdims=True)) for one in sums[0]]
    whole = stats.estimate_groups(in_one, weights)
    counted = [one for one in opened if one.source.weight > 0]
    kinds = {one.kind for one in counted}
    return Explanation(
        step_a=a.step,
        step_b=b.step,
        tokens=T * sum(one.source.windows for one in counted),
        units=sum(int(one.unit.max()) + 1 for one in counted),
        unit=kinds.pop() if len(kinds) == 1 else "document or window",
        difference=float(whole.part.value[0]),
        difference_se=finite(float(whole.part.se[0])),
        p=_p_of(in_one, weights),
        exact_difference=b.val_loss - a.val_loss,
        splits=_splits(groupings, found),
        left_out=tuple(left_out),
    )


def _p_of(sources: list[stats.Sums], weights: list[float]) -> float | None:
    """Return the p-value of no difference of all tokens, from their sums by unit, (U, 1), of each source."""
    counted = [(s, w) for s, w in zip(sources, weights, strict=True) if w > 0]
    ends = np.cumsum([0, *(len(s.tokens) for s, _ in counted)]).tolist()
    return stats.p_of_zero_mean(
        np.concatenate([s.difference[:, 0] / s.tokens[:, 0] for s, _ in counted]),
        np.concatenate([w * s.tokens[:, 0] / s.tokens.sum() for s, w in counted]),
        [slice(*pair) for pair in itertools.pairwise(ends)],
    )


def _chunks(
    opened: list[_Windows], a: TokenLosses, b: TokenLosses
) -> Iterator[tuple[_Chunk, tuple[np.ndarray, ...]]]:
    """Yield chunks of windows with three flat arrays over their targets: ones, the losses of A, and B - A.

    Raises: DataError after the last window of a source if the windows are not those that were measured.
    """
    T, begin = a.losses.shape[1], 0
    step = max(1, _TOKENS_AT_ONCE // T)
    for one in opened:
        count = one.source.windows
        checksums = np.empty(count, np.uint32)
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            windows = one.reader.read(one.shard[rows], one.offset[rows])
            checksums[rows] = checksums_of(windows)
            place = slice(begin + rows.start, begin + rows.stop)
            of_a = a.losses[place].astype(np.float64).ravel()
            difference = b.losses[place].astype(np.float64).ravel() - of_a
            yield _Chunk(one, rows, windows), (np.ones_like(of_a), of_a, difference)
        if hash_checksums(checksums) != one.source.windows_sha256:
            raise one.changed()
        one.reader.close()
        begin += count


def _splits(groupings: _Groupings, found: list[stats.GroupMeans]) -> tuple[Split, ...]:
    """Return the splits; a group stands out after correction for the number of groups of all splits (Bonferroni)."""
    filled = [np.flatnonzero(means.share > 0).tolist() for means in found]
    tests = sum(len(groups) for groups in filled if len(groups) > 1)
    splits = []
    for (by, (names, _)), means, groups in zip(groupings.items(), found, filled, strict=True):
        tested = tests if len(groups) > 1 else 0
        splits.append(Split(by, tuple(_group(names[g], means, g, tests=tested) for g in groups)))
    return tuple(splits)


def _group(name: str, means: stats.GroupMeans, g: int, *, tests: int) -> Group:
    """Return group number `g`. `tests`: number of groups that are tested; 0 if this one is not."""

    def at(estimates: stats.Estimates) -> tuple[float, float, float]:
        return (float(estimates.value[g]), float(estimates.se[g]), float(estimates.degrees[g]))

    mean, mean_se, _ = at(means.mean)
    part, part_se, part_degrees = at(means.part)
    excess, excess_se, excess_degrees = at(means.excess)
    half = math.nan
    if part_degrees >= stats.LEAST_DEGREES:
        half = float(stats.t_half_width(part_se, part_degrees))
    can_test = tests > 0 and excess_se > 0 and excess_degrees >= stats.LEAST_DEGREES
    p = float(stats.t_p_value(excess, excess_se, excess_degrees)) if can_test else 1.0
    return Group(
        name=name,
        tokens=float(means.share[g]),
        a=float(means.a[g]),
        b=float(means.a[g]) + mean,
        mean=mean,
        mean_se=finite(mean_se),
        part=part,
        part_se=finite(part_se),
        part_low=finite(part - half),
        part_high=finite(part + half),
        excess=excess,
        excess_se=finite(excess_se),
        stands_out=can_test and p * tests < stats.ALPHA,
    )


def sentence(found: Explanation) -> str:
    """Return in one sentence how large the difference is and where it is concentrated: at most one group per split."""
    size = f"{abs(found.difference):.4f} +- {fmt.number(found.difference_se)} nats/token"
    whole = f"B is {'better' if found.difference < 0 else 'worse'} by {size}"
    if not _is_clear(found):
        whole = f"B and A differ by {size}, which is within noise"
    named = []
    for split in found.splits:
        if standing := [group for group in split.groups if group.stands_out]:
            named.append((split, max(standing, key=lambda group: abs(group.excess))))
    if not named:
        return f"{whole}; no group of tokens differs from the others by more than noise."
    named.sort(key=lambda pair: -abs(pair[1].excess))
    places = [
        f"'{group.name}' ({split.by.partition(':')[0]}; {group.tokens:.0%} of the tokens, "
        f"{_share(group, found) if _is_clear(found) else f'{group.part:+.4f}'} of the difference)"
        for split, group in named[:_MOST_NAMED]
    ]
    return f"{whole}; groups farthest from their share of the tokens: {', '.join(places)}."


def _is_clear(found: Explanation) -> bool:
    """Return whether the whole is far enough from zero to divide by it."""
    return found.p is not None and found.p < stats.ALPHA


def _share(group: Group, found: Explanation) -> str:
    return f"{round(group.part / found.difference, 2) + 0.0:.0%}"  # never -0%


def describe_explanation(found: Explanation) -> str:
    """Format the explanation as tables."""
    header = ("tokens", "A", "B", "B - A", "se", "part", "se", "of all", "")
    rows: list[tuple[str, ...]] = []
    for split in found.splits:
        rows.append((f"by {split.by}", *header) if not rows else (f"by {split.by}", *[""] * 9))
        for g in split.groups:
            of_all = _share(g, found) if _is_clear(found) else "-"
            rows.append(
                (
                    f"  {g.name}",
                    f"{g.tokens:.1%}",
                    *(f"{g.a:.4f}", f"{g.b:.4f}", f"{g.mean:+.4f}", fmt.number(g.mean_se)),
                    *(f"{g.part:+.4f}", fmt.number(g.part_se), of_all),
                    "*" if g.stands_out else "",
                )
            )
    steps = ", ".join(
        f"{which} after step {step:,}"
        for which, step in (("A", found.step_a), ("B", found.step_b))
        if step is not None
    )
    left_out = "".join(f"\nnot split by {reason}" for reason in found.left_out)
    return (
        f"{sentence(found)}\n\n"
        f"{fmt.table(rows[0], rows[1:])}{left_out}\n\n"
        f"{found.tokens:,} tokens of {fmt.number_of(found.units, found.unit)}{f' ({steps})' if steps else ''}. "
        f"part: tokens x (B - A); the parts of a split add up to {found.difference:+.4f}, which is "
        f"{abs(found.difference - found.exact_difference):.1g} from the exact difference, because losses are kept in "
        f"fp16. se: over {found.unit}s. *: the part differs from the group's share of the tokens by more than noise "
        f"(p < {stats.ALPHA:g}, Bonferroni over all groups)."
    )

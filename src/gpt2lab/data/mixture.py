"""Sample number -> (source, its own sample number): a mixture of folders as a function of the number alone.

A pattern of PATTERN places says whose turn each sample is, and repeats. For sample n of a phase and a source with k
places, q, r = divmod(n, PATTERN): its own number is q k + (its places before r). So a mixture has no position to save,
and each source goes through its own epochs in its own order, whatever the others do. No torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import paths
from gpt2lab.config.mixture import DataSources, Phase, read_sources
from gpt2lab.config.schema import Config
from gpt2lab.data.manifest import fingerprint_of
from gpt2lab.data.order import VERSION, Order
from gpt2lab.data.shards import TokenData, open_data
from gpt2lab.errors import ConfigError, DataError

PATTERN = 4096  # places; a share is met to less than 1 / 4096


def count_places(weights: Sequence[float]) -> np.ndarray:
    """Return how many of the PATTERN places each source has, (S,) int64, by largest remainders; equal ones in order.

    Raises: ValueError naming the index of a source whose weight is above 0 and too small for one place.
    """
    exact = [Fraction(weight) for weight in weights]
    quotas = [PATTERN * weight / sum(exact) for weight in exact]
    counts = np.array([int(quota) for quota in quotas], dtype=np.int64)
    by_remainder = sorted(range(len(quotas)), key=lambda s: int(quotas[s]) - quotas[s])
    counts[by_remainder[: PATTERN - counts.sum()]] += 1
    for source, weight in enumerate(exact):
        if weight and not counts[source]:
            raise ValueError(source)
    return counts


def build_pattern(counts: np.ndarray) -> np.ndarray:
    """Return the source of each place, (PATTERN,) int64, given the places of each, (S,), which add up to PATTERN.

    After any n places each of the m sources that have any is within 1 - 1 / (2m - 2) of n k / PATTERN. Source:
    Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32. Sorting the middles (j + 1/2) / k is
    simpler, but misses by 2 places with 8 sources, because small ones fall due together.
    """
    sources = np.flatnonzero(counts)
    if len(sources) == 1:
        return np.full(PATTERN, sources[0])
    k, m = counts[sources], len(sources)
    pattern, given = np.empty(PATTERN, dtype=np.int64), np.zeros(m, dtype=np.int64)
    for place in range(PATTERN):
        owed = k * (place + 1) - PATTERN * given  # in 1 / PATTERN places
        # Fractions of small whole numbers: equal ones are equal floats on every machine.
        deadline = ((2 * m - 2) * given + 2 * m - 3) / k
        chosen = int(np.where(owed * (2 * m - 2) >= PATTERN, deadline, np.inf).argmin())
        pattern[place] = sources[chosen]
        given[chosen] += 1
    return pattern


class Mixture:
    """The endless sequence of training samples over several sources; it locates samples as an Order does.

    Shards are numbered through all sources, in their order.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        phases: Sequence[tuple[int, Sequence[int]]],
        *,
        names: Sequence[str],
    ) -> None:
        """`phases`: first sample number and places of each source in the pattern; the first begins at 0."""
        self.orders, self.names = tuple(orders), tuple(names)
        self.context_length, self.version = orders[0].context_length, orders[0].version
        self.windows_per_epoch = sum(order.windows_per_epoch for order in orders)  # of all together
        self.unused_targets = sum(order.unused_targets for order in orders)
        shards = [len(order.windows) for order in orders]
        self._first_shard = np.concatenate([[0], np.cumsum(shards)[:-1]])
        self._begins = np.array([first for first, _ in phases], dtype=np.int64)
        self._counts = np.array([counts for _, counts in phases], dtype=np.int64)  # (phases, S)
        self._patterns = [build_pattern(counts) for counts in self._counts]
        is_of = [pattern[:, None] == np.arange(len(orders)) for pattern in self._patterns]
        self._before = [each.cumsum(axis=0) - each for each in is_of]  # (PATTERN, S) each
        self._base = np.zeros_like(self._counts)  # each source's own number where a phase begins
        for phase in range(1, len(phases)):
            self._base[phase] = self._count(int(self._begins[phase]), phase - 1)

    def counts_before(self, sample: int) -> np.ndarray:
        """Return how many of the samples before number `sample` are each source's, (S,) int64."""
        return self._count(sample, self.phase_of(sample))

    def _count(self, sample: int, phase: int) -> np.ndarray:
        q, r = divmod(sample - int(self._begins[phase]), PATTERN)
        counts: np.ndarray = self._base[phase] + q * self._counts[phase] + self._before[phase][r]
        return counts

    def divide(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source and its own sample number of each sample number; all (n,) int64."""
        samples = np.asarray(samples, dtype=np.int64)
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        phases = np.searchsorted(self._begins, samples, side="right") - 1
        for phase in np.unique(phases).tolist():
            chosen = phases == phase
            q, r = np.divmod(samples[chosen] - self._begins[phase], PATTERN)
            source = self._patterns[phase][r]
            sources[chosen] = source
            within = q * self._counts[phase][source] + self._before[phase][r, source]
            numbers[chosen] = self._base[phase][source] + within
        return sources, numbers

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return shard index and token offset of each sample number; both (n,) int64."""
        sources, numbers = self.divide(samples)
        shards, offsets = np.empty_like(sources), np.empty_like(sources)
        for source in np.unique(sources).tolist():
            chosen = sources == source
            shards[chosen], offsets[chosen] = self.orders[source].locate(numbers[chosen])
            shards[chosen] += self._first_shard[source]
        return shards, offsets

    def epoch_of(self, sample: int) -> int:
        """Return how often as many windows as all sources have together came before a sample."""
        return sample // self.windows_per_epoch

    def epochs_before(self, sample: int) -> dict[str, float]:
        """Return how many passes the samples before number `sample` make over each source."""
        counts = self.counts_before(sample).tolist()
        rows = zip(self.names, self.orders, counts, strict=True)
        return {name: count / order.windows_per_epoch for name, order, count in rows}

    def phase_of(self, sample: int) -> int:
        """Return the number of the phase that a sample belongs to, from 0."""
        return int(np.searchsorted(self._begins, sample, side="right")) - 1

    def shares(self, phase: int) -> dict[str, float]:
        """Return each source's share of the samples of a phase."""
        return dict(zip(self.names, (self._counts[phase] / PATTERN).tolist(), strict=True))


@dataclass(frozen=True)
class MixedData(TokenData):
    """Several folders of shards and their weights; the splits hold the shards of all of them, source by source."""

    names: tuple[str, ...] = ()
    sources: tuple[TokenData, ...] = ()
    phases: tuple[Phase, ...] = ()

    def by_source(self) -> tuple[TokenData, ...]:
        """Return the folders."""
        return self.sources

    def places(self) -> list[tuple[int, list[int]]]:
        """Return the first token of each phase, and the places of each source in its pattern."""
        return [(phase.from_tokens, self._count(phase)) for phase in self.phases]

    def _count(self, phase: Phase) -> list[int]:
        try:
            return [int(count) for count in count_places(phase.weights)]
        except ValueError as error:
            (source,) = error.args
            raise ConfigError(
                f"{self.names[source]}: its weight {phase.weights[source]:g} is too small a part of "
                f"{sum(phase.weights):g}; the least is about 1 of {PATTERN}; raise it or leave the folder out"
            ) from None

    def with_phases(self, phases: tuple[Phase, ...]) -> MixedData:
        """Return the same folders in other proportions."""
        data = dataclasses.replace(self, phases=phases)
        parts = {
            "pattern": PATTERN,
            "sources": [source.fingerprint for source in self.sources],
            "places": data.places(),
        }
        return dataclasses.replace(data, fingerprint=fingerprint_of(parts))

    def describe(self, unused_targets: int) -> str:
        """Describe the data for people."""
        (_, counts), *later = self.places()
        shares = (f"{k / PATTERN:.2%} {name}" for name, k in zip(self.names, counts, strict=True))
        return (
            f"{' + '.join(shares)}{', other weights later' if later else ''}; "
            f"{self.tokens('train'):,} training tokens ({unused_targets:,} targets at shard ends unused), "
            f"fingerprint {self.fingerprint[:12]}"
        )


def missing_folders(config: Config) -> list[Path]:
    """Return the folders of a run's data that are gone; a fine-tuned run has none."""
    if config.tuning.instructions is not None:
        return []
    return [folder for folder in read_sources(config.data).folders if not folder.is_dir()]


def require_folders(config: Config, flag: str) -> None:
    """Reject a run's settings whose folders of data are gone; other data would be the wrong advice.

    Raises: DataError that names the flag that says where they are now.
    """
    for folder in missing_folders(config):
        raise DataError(
            f"{folder}: the run's data are no longer there; if they were moved, say where with {flag}"
        )


def open_sources(sources: DataSources, *, vocab_size: int) -> TokenData:
    """Check the folders of a run in milliseconds; a single one is what `open_data` returns.

    Raises: DataError, ConfigError, also where the ids of two folders do not mean the same text.
    """
    if len(sources.folders) == 1:
        (folder,) = sources.folders
        before_colon = str(folder).rpartition(":")[0]
        if before_colon and not folder.exists() and Path(before_colon).is_dir():
            raise DataError(
                f"{folder}: no such data folder; a weight needs several folders, each as PATH:WEIGHT"
            )
        return open_data(folder, vocab_size=vocab_size)
    opened = [open_data(folder, vocab_size=vocab_size) for folder in sources.folders]
    for number, folder in enumerate(sources.folders):
        if any(os.path.samefile(folder, other) for other in sources.folders[:number]):
            raise ConfigError(f"data_dir {folder}: given twice, the other time through a link")
    first, *others = opened
    for data in others:
        if data.tokenizer is None or data.tokenizer != first.tokenizer:
            raise DataError(
                f"{data.folder}: not known to have the tokenizer of {first.folder}, so equal ids would mean other "
                f"text; prepare both with one tokenizer"
            )
    splits = {s: tuple(shard for data in opened for shard in data.splits[s]) for s in first.splits}
    return MixedData(
        folder=Path("+".join(sources.names)),
        fingerprint="",
        splits=splits,
        warnings=tuple(warning for data in opened for warning in data.warnings),
        tokenizer=first.tokenizer,
        end_of_text=first.end_of_text,
        names=sources.names,
        sources=tuple(opened),
    ).with_phases(sources.phases)


def training_order(data: TokenData, config: Config, *, version: int = VERSION) -> Order | Mixture:
    """Return the order of a run's training samples. Each source of a mixture shuffles with its own seed.

    Raises: DataError if a shard is too short.
    """
    parts, T, seed = data.by_source(), config.model.context_length, config.data.seed
    seeds = [seed] if len(parts) == 1 else [_seed_of(seed, number) for number in range(len(parts))]
    how = {"context_length": T, "shuffle": config.data.shuffle, "version": version}
    orders = [
        _order(part, "train", **how, seed=own) for part, own in zip(parts, seeds, strict=True)
    ]
    if not isinstance(data, MixedData):
        return orders[0]
    # A phase begins with the first window that has all its targets past the given token.
    phases = [(-(-tokens // T), counts) for tokens, counts in data.places()]
    return Mixture(orders, phases, names=data.names)


def validation_orders(data: TokenData, *, context_length: int) -> tuple[Order, ...]:
    """Return the windows of each source's validation split, in the order of the disk.

    Raises: DataError if a shard is too short.
    """
    how = {"context_length": context_length, "shuffle": "none", "seed": 0}
    return tuple(_order(part, "val", **how) for part in data.by_source())


def _order(data: TokenData, split: str, **how: Any) -> Order:
    try:
        return Order([shard.tokens for shard in data.splits[split]], **how)
    except DataError as error:
        raise DataError(
            f"{data.folder}, {split} {error}; use longer shards or a smaller --context_length"
        ) from None


def _seed_of(seed: int, source: int) -> int:
    """Return the seed of a source's own order: sources of equal size must not shuffle alike."""
    return int.from_bytes(hashlib.sha256(f"{seed} {source}".encode()).digest()[:4], "big")


def check_epochs(sources: DataSources, order: Order | Mixture, *, samples: int) -> None:
    """Reject a run of so many samples that has more epochs of a source than --max_source_epochs allows.

    Raises: ConfigError with the numbers.
    """
    if isinstance(order, Mixture):
        used, orders = order.counts_before(samples).tolist(), order.orders
    else:
        used, orders = [samples], (order,)
    for name, limit, count, own in zip(
        sources.names, sources.max_epochs, used, orders, strict=True
    ):
        if limit is not None and count > limit * own.windows_per_epoch:
            raise ConfigError(
                f"{name}: this run takes {count:,} of its {own.windows_per_epoch:,} windows, "
                f"{count / own.windows_per_epoch:.2f} passes, and --max_source_epochs allows {limit:g}; "
                f"lower its weight, shorten the run, or raise the limit"
            )


def describe_sources(data: TokenData, order: Order | Mixture, *, samples: int) -> list[str]:
    """Write a line for each source of a mixture: its shares, its size, its passes in a run of so many samples."""
    if not isinstance(order, Mixture):
        return []
    epochs, lines = order.epochs_before(samples), []
    phases = [order.shares(p) for p in range(1 + order.phase_of(samples))]
    for name, source in zip(order.names, data.by_source(), strict=True):
        shares = ", then ".join(f"{share[name]:.2%}" for share in phases)
        lines.append(
            f"{name}: {shares} of the samples, {source.tokens('train'):,} training tokens, "
            f"{epochs[name]:.3f} epochs ({paths.display_path(source.folder)})"
        )
    return lines

"""A source -> a folder of token shards and their manifest; an interrupted preparation resumes.

Finished groups are collected in OUT.partial; the last act is one rename to OUT.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpt2lab import fmt, paths
from gpt2lab.checkpoint.faults import faultpoint
from gpt2lab.data.manifest import MANIFEST, read_manifest, shares_of
from gpt2lab.data.prepare.assemble import assemble, check_prepared
from gpt2lab.data.prepare.encode import EncoderPool, batch_chunks, key_of
from gpt2lab.data.prepare.groups import GROUP_BYTES, FileGroup, deal, of_part
from gpt2lab.data.prepare.readers import read, state_of
from gpt2lab.data.prepare.sources import TextSource
from gpt2lab.data.prepare.work import (
    ChangedError,
    Finished,
    Task,
    changed_files,
    drop_unfinished,
    run_task,
)
from gpt2lab.data.prepare.write import EVERY_DOCUMENT, SplitRule, rule_by_documents, rule_for
from gpt2lab.data.shards import JOURNAL
from gpt2lab.distributed import processor
from gpt2lab.errors import DataError, system_errors_as
from gpt2lab.files import JsonFile, regular, replace_durably, sync_folder
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer

VAL_FRACTION = 0.05
LEAST_TOKENS = 16  # of a data set
LARGEST_DEFAULT_VAL = 100_000_000
_GROUPS, _WHOLE = "groups", "whole"  # folders of OUT.partial
_STATES = ".sources.json"  # of the source files, on this machine: what need not be hashed again
_WORTH_WORKERS = 4_000_000  # bytes of text; below, starting workers takes longer than the work


@dataclass(frozen=True)
class Sizes:
    """Tokens in a shard, in the validation split (about) and in all, and stored bytes of a group."""

    shard_tokens: int = 100_000_000
    val_tokens: int | None = None  # default 5 % of the expected size, at most 100M
    max_tokens: int | None = None
    group_bytes: int = GROUP_BYTES


@dataclass(frozen=True)
class Result:
    """What was written; `seconds` and `new_tokens` count this start alone."""

    folder: Path
    manifest: dict[str, Any]
    new_tokens: int
    seconds: float
    tokenizer: Tokenizer
    warnings: tuple[str, ...] = ()

    def total(self, fact: str, split: str | None = None) -> int:
        """Sum tokens, bytes, documents or text_bytes over the files, of all or of one split."""
        files = self.manifest["files"]
        return sum(file[fact] for file in files if split in (None, file["split"]))


def result_table(result: Result) -> str:
    """Write the result as a table."""
    tokens, documents = result.total("tokens"), result.total("documents")
    train, val = result.total("tokens", "train"), result.total("tokens", "val")
    held = result.total("documents", "val")
    text, speed = result.total("text_bytes"), result.new_tokens / result.seconds
    left_out, split = result.manifest["left_out"], result.manifest["split"]
    back, stored = split["held_back_tokens"], fmt.num_bytes(result.total("bytes"))
    rows = [
        ("documents", f"{documents:,} ({documents - held:,} train, {held:,} val)"),
        ("tokens", f"{tokens:,} ({train:,} train, {val:,} val)"),
        ("text", f"{fmt.num_bytes(text)} ({text / tokens:.2f} bytes a token)"),
        ("mean document", f"{tokens / documents:,.0f} tokens"),
        ("tokenizer", result.tokenizer.title),
        ("shards", f"{len(result.manifest['files']):,} files, {stored}"),
        ("time", f"{fmt.duration(result.seconds)} ({speed:,.0f} tokens/s)"),
        ("folder", paths.display_path(result.folder)),
    ]
    if back:
        rows.insert(2, ("held back", f"{back:,} tokens of long val documents, in neither split"))
    if any(left_out.values()):
        text_of = f"{left_out['bad']:,} bad records, {left_out['empty']:,} empty documents"
        rows.insert(1, ("left out", text_of))
    return "\n".join(f"{name:<14} {value}" for name, value in rows)


@dataclass(frozen=True)
class PreparationPlan:
    """What a preparation does; the same on every machine that prepares a part."""

    tasks: tuple[Task, ...]  # of this part
    rule: SplitRule  # of all groups but those of a validation file
    num_groups: int  # of all parts
    expected: int  # tokens of this part, roughly
    val_tokens: int  # of all parts, roughly
    takes_share: bool  # these are VAL_FRACTION of what is expected: no usable number was given
    note: str | None


def plan_preparation(
    source: TextSource,
    sizes: Sizes,
    *,
    part: tuple[int, int] = (1, 1),
    skip_bad: bool = False,
    shuffle: bool = False,
    tokenizer: Tokenizer,
) -> PreparationPlan:
    """Divide the source into groups and decide which documents are held out.

    `max_tokens` are taken from the first groups in proportion to their sizes: from as many groups as hold three times
    that number by the sizes of their files. Where one file is the validation split, they are training tokens, and
    `val_tokens` its first ones; default all.

    Raises: DataError if there are fewer groups than parts.
    """
    groups, held_out = (
        deal(files, group_bytes=sizes.group_bytes, shuffle=shuffle) for files in source.split()
    )
    size, val_size = (sum(group.size for group in some) for some in (groups, held_out))
    expected = max(1, source.text_bytes() // tokenizer.bytes_per_token)
    of_val = expected * val_size // max(1, size + val_size)
    expected -= of_val
    budgets: dict[int, int | None] = {group.number: None for group in groups}
    if sizes.max_tokens is not None and 3 * sizes.max_tokens < expected:
        ends = list(itertools.accumulate(group.size for group in groups))
        groups = groups[: 1 + bisect.bisect_left(ends, 3 * sizes.max_tokens / expected * size)]
    if sizes.max_tokens is not None:
        budgets = _share_out(sizes.max_tokens, groups)
        expected = min(expected, sizes.max_tokens)
    val_tokens, note = sizes.val_tokens, None
    largest = max(2, int(VAL_FRACTION * expected))
    if val_tokens is None:
        val_tokens = min(LARGEST_DEFAULT_VAL, largest)
    elif 2 * val_tokens > expected and not held_out:
        note = f"val_tokens {val_tokens:,} is over half of the text; about {largest:,} are held out"
        val_tokens = largest
    rule, first = rule_for(val_tokens, expected), len(groups)
    if held_out:
        rule = SplitRule(0, rule.cap)
        held_out = tuple(dataclasses.replace(g, number=first + g.number) for g in held_out)
        budgets |= dict.fromkeys(group.number for group in held_out)
        if sizes.val_tokens is not None:
            budgets |= _share_out(sizes.val_tokens, held_out)
        groups, expected = groups + held_out, expected + min(sizes.val_tokens or of_val, of_val)
    if part[1] > len(groups):
        raise DataError(
            f"part {part[0]}/{part[1]}: {source.origin} has {len(groups)} groups of files; use at most that many "
            f"parts, or a smaller --group_bytes"
        )
    tasks = tuple(
        Task(
            group=group,
            text_column=source.text_column,
            shard_tokens=sizes.shard_tokens,
            rule=rule if group.number < first else EVERY_DOCUMENT,
            budget=budgets[group.number],
            skip_bad=skip_bad or source.skips_bad,
            shuffle=shuffle,
            tokenizer=tokenizer,
        )
        for group in of_part(groups, part)
    )
    takes_share = sizes.val_tokens != val_tokens
    per_part = expected // part[1]
    return PreparationPlan(tasks, rule, len(groups), per_part, val_tokens, takes_share, note)


def _share_out(tokens: int, groups: Sequence[FileGroup]) -> dict[int, int | None]:
    """Return each group's budget in proportion to its size; together they are `tokens`."""
    total, held, given = max(1, sum(group.size for group in groups)), 0, 0
    budgets: dict[int, int | None] = {}
    for group in groups:
        held += group.size
        budgets[group.number] = tokens * held // total - given
        given = tokens * held // total
    return budgets


def prepare(
    source: TextSource,
    folder: Path,
    sizes: Sizes,
    *,
    num_workers: int | None = None,
    part: tuple[int, int] = (1, 1),
    skip_bad: bool = False,
    shuffle: bool = False,
    tokenizer: Tokenizer,
    ray_address: str | None = None,
) -> Result | None:
    """Tokenize a source into `folder`; return None if the same data of the same tokenizer exists already.

    The shards depend neither on `num_workers` (default: one per core), nor on parts or a Ray cluster, nor on
    interruptions. With `shuffle` documents are mixed, over all files as far as these are large.

    Raises: DataError if the folder holds something else, a record cannot be read, or there is too little text.
    """
    folder = Path(os.path.realpath(folder))  # a link decides on which disk the shards are written
    request = {
        "listing": source.identity,
        "part": list(part),
        **dataclasses.asdict(sizes),
        "shuffle": shuffle,
    }
    if tokenizer != GPT2:
        request["tokenizer"] = tokenizer.hash
    if _is_done(source, folder, request):
        return None
    began = time.monotonic()
    try:
        plan = plan_preparation(
            source, sizes, part=part, skip_bad=skip_bad, shuffle=shuffle, tokenizer=tokenizer
        )
        run = _Runner(plan, num_workers, ray_address)
        manifest, cut = _write(source, folder, request, plan, run)
    except KeyboardInterrupt as interrupt:
        if str(interrupt):  # it tells what is kept of this start
            raise
        earlier = f"{paths.display_path(_partial(folder))} keeps what an earlier start prepared"
        raise KeyboardInterrupt(
            earlier if _partial(folder).exists() else "nothing was written"
        ) from interrupt
    notes = (source.note, plan.note, _CUT_NOTE if cut else None)
    warnings = tuple(note for note in notes if note)
    seconds = time.monotonic() - began
    return Result(folder, manifest, run.new_tokens, seconds, tokenizer, warnings)


def _write(
    source: TextSource, folder: Path, request: dict[str, Any], plan: PreparationPlan, run: _Runner
) -> tuple[dict[str, Any], int | None]:
    """Write the data set; return its manifest and how many tokens were cut off instead of held out."""
    with (
        system_errors_as(DataError, folder, what="cannot be written"),
        _staging(folder, request, plan) as partial,
    ):
        finished, split, cut = _divide(plan, run, partial / _GROUPS, source)
        states = _states_of(source)
        for task, group in zip(plan.tasks, finished, strict=True):
            if changed := task.changed_files(group):
                raise ChangedError(changed[0])
        shutil.rmtree(partial / _WHOLE, ignore_errors=True)  # of a start that was killed
        manifest = assemble(
            finished,
            partial / _WHOLE,
            dataset=source.dataset,
            origin=source.origin,
            request=request,
            split=split,
            tokenizer=plan.tasks[0].tokenizer,
            cut=cut,
        )
        (partial / _WHOLE / _STATES).write_text(states)
        faultpoint("data.before_folder_is_named", 0)
        if folder.is_dir():
            folder.rmdir()  # an empty one
        os.rename(partial / _WHOLE, folder)
        sync_folder(folder.parent)
        faultpoint("data.after_folder_is_named", 0)
        shutil.rmtree(partial, ignore_errors=True)
    return manifest, cut


_CUT_NOTE = (
    "too few documents to hold one out: the end of the text is the validation split, and continues where "
    "training ends"
)


class _Runner:
    def __init__(
        self, plan: PreparationPlan, num_workers: int | None, ray_address: str | None
    ) -> None:
        self.new_tokens = 0
        self._expected, self._ray_address = plan.expected, ray_address
        # On a cluster groups run side by side, so that one process each is enough.
        is_little = plan.expected * plan.tasks[0].tokenizer.bytes_per_token < _WORTH_WORKERS
        default = 1 if is_little or ray_address is not None else processor.cores()
        self._num_workers = num_workers or default

    def __call__(self, tasks: Sequence[Task], folder: Path) -> list[Finished]:
        """Run the tasks below `folder`; those that are finished are only read."""
        drop_unfinished(folder)
        often = 0.1 if sys.stderr.isatty() else 4.0  # seconds
        with tqdm(total=self._expected, unit="tok", unit_scale=True, mininterval=often) as bar:

            def on_tokens(count: int) -> None:
                self.new_tokens += count
                bar.update(count)

            if self._ray_address is not None:
                from gpt2lab.data.prepare.cluster import run_on_ray

                return run_on_ray(
                    tasks, folder, on_tokens, address=self._ray_address, cores=self._num_workers
                )
            tokenizer = tasks[0].tokenizer
            with contextlib.closing(EncoderPool(self._num_workers, tokenizer)) as pool:
                return [run_task(task, folder, pool, on_tokens) for task in tasks]


def _divide(
    plan: PreparationPlan, run: _Runner, folder: Path, source: TextSource
) -> tuple[list[Finished], dict[str, Any], int | None]:
    """Return the groups, how documents were held out, and how many tokens to cut off instead.

    Where the threshold leaves one split without text, whole documents are chosen by their keys, which takes a second
    run: only a single group can know all keys.
    """
    finished = run(plan.tasks, folder)
    train, val, back = (
        sum(group.facts[name] for group in finished)
        for name in ("train_tokens", "val_tokens", "held_back")
    )
    total, rule, name = train + val + back, plan.rule, "documents below a threshold"
    is_part = len(finished) < plan.num_groups
    if source.val_file is not None:
        if not is_part and min(train, val) < 2:
            raise DataError(
                f"{source.origin}: {train} tokens to train on, {val} in {source.val_file}"
            )
        return finished, _record(f"file {source.val_file}", rule), None
    if total == 0 and not is_part:
        raise DataError(f"{source.origin}: no document contains text")
    if total < LEAST_TOKENS and not is_part:
        raise DataError(
            f"{source.origin}: only {total} tokens; two splits need at least {LEAST_TOKENS}"
        )
    val_tokens = plan.val_tokens
    if plan.takes_share and 2 * VAL_FRACTION * total < val_tokens:  # far less text than expected
        val_tokens = max(2, int(VAL_FRACTION * total))
    if train >= 2 and 4 * val >= val_tokens:
        return finished, _record(name, rule), None
    if plan.num_groups > 1:
        if is_part or (train >= 2 and val >= 2):  # merge decides about the parts
            return finished, _record(name, rule), None
        raise DataError(
            f"{source.origin}: {train:,} tokens for training and {val:,} held out, because there are so few documents; "
            f"cut long ones into several, or give another --val_tokens"
        )
    wanted = min(val_tokens, max(2, total // 2))
    chosen = rule_by_documents(wanted, finished[0].facts["smallest"], total)
    if chosen is not None:
        (group,) = again = _run_by(chosen, plan, run, folder / "documents")
        if min(group.facts["train_tokens"], group.facts["val_tokens"]) >= 2:
            return again, _record("whole documents", chosen), None
    cut, none = max(2, min(val_tokens, total // 2)), SplitRule(0, rule.cap)
    return _run_by(none, plan, run, folder / "cut"), _record("cut", none), cut


def _run_by(rule: SplitRule, plan: PreparationPlan, run: _Runner, folder: Path) -> list[Finished]:
    folder.mkdir(exist_ok=True)
    return run([dataclasses.replace(task, rule=rule) for task in plan.tasks], folder)


def _record(name: str, rule: SplitRule) -> dict[str, Any]:
    return {"held_out": name, "threshold": rule.threshold, "tokens_of_a_document": rule.cap}


def _is_done(source: TextSource, folder: Path, request: dict[str, Any]) -> bool:
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return False
    different = ""
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        before = manifest.get("request")
        if isinstance(before, dict) and "content" in before:  # its name in an earlier version
            before["listing"] = before.pop("content")
        if before == request:
            check_prepared(folder, manifest)
            if not (changed := _changed_since(source, folder, manifest)):
                # Left by a start that was killed at its very end.
                shutil.rmtree(_partial(folder), ignore_errors=True)
                return True
            different = (
                f" (the bytes of {len(changed):,} source files differ, such as {changed[0]})"
            )
        elif isinstance(before, dict):
            names = [name for name in request if before.get(name) != request[name]]
            different = f" (another {', '.join(names or ['version']).replace('listing', 'source')})"
    raise DataError(
        f"{folder}: holds something else already{different}; choose another --out, or move it away"
    )


def _changed_since(source: TextSource, folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return the names of source files whose bytes are not those that were prepared; [] where no hash was kept."""
    if "content" not in manifest:
        return []
    states: dict[str, Any] = {}
    with contextlib.suppress(DataError):
        states = JsonFile(folder / _STATES, DataError).read()
    now = _states_of(source)
    changed = changed_files(source.files, shares_of(manifest), states)
    if not changed and json.loads(now) != states:
        with contextlib.suppress(OSError):
            replace_durably(folder / _STATES, now)
    return changed


def _states_of(source: TextSource) -> str:
    return json.dumps({file.name: state_of(file) for file in source.files}) + "\n"


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


@contextlib.contextmanager
def _staging(target: Path, request: dict[str, Any], plan: PreparationPlan) -> Iterator[Path]:
    """Hand out OUT.partial, locked; after an error the next start finds its finished groups, if there are any."""
    partial = _partial(target)
    with system_errors_as(DataError, partial, what="cannot be written", fix="choose another --out"):
        partial.mkdir(parents=True, exist_ok=True)
        lock = open(partial / "lock", "a", opener=regular)  # noqa: SIM115 - closed below
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{partial}: another process is preparing this folder") from error
        rule = dataclasses.asdict(plan.rule)
        wanted = (json.dumps({**request, "rule": rule}, sort_keys=True) + "\n").encode()
        journal = partial / JOURNAL
        if journal.exists() and journal.read_bytes() != wanted:
            raise DataError(
                f"{partial}: holds the unfinished work of another command line, source or version; "
                f"repeat that command, or delete the folder"
            )
        replace_durably(journal, wanted)
        (partial / _GROUPS).mkdir(exist_ok=True)
        try:
            yield partial
        except BaseException as error:
            done, count = len(list((partial / _GROUPS).glob("group_*"))), len(plan.tasks)
            # With all groups done, a repeated start would fail in the same way.
            is_final = done == count and not isinstance(error, ChangedError)
            if not done or (is_final and isinstance(error, DataError)):
                shutil.rmtree(partial, ignore_errors=True)
            elif isinstance(error, (DataError, KeyboardInterrupt)):
                kept = (
                    f"{done} of {count} groups are kept in {paths.display_path(partial)}: "
                    f"the same command line continues from there"
                )
                raise type(error)("; ".join(filter(None, (str(error), kept)))) from error
            raise


_GROUP_BYTES = 64_000_000


def learning_texts(
    source: TextSource,
    *,
    max_bytes: int,
    val_tokens: int | None = None,
    max_tokens: int | None = None,
    skip_bad: bool = False,
    with_held_out: bool = False,
    cuts: re.Pattern[str] | None,
) -> Iterator[str]:
    """Yield texts of the documents that a preparation with the same token counts trains on, up to `max_bytes` in all.

    Of a larger text it takes shares of all files, mixed by their names. A long document comes in several texts, cut
    where `cuts` allows it. Documents are held out as in a preparation, by the hash of their text; where that finds too
    few, a preparation holds out others, which may have been seen here.

    Raises: DataError on a record that cannot be read, unless `skip_bad`.
    """
    # The new tokenizer will have about as many bytes per token as GPT-2's.
    sizes = Sizes(val_tokens=val_tokens, max_tokens=max_tokens)
    plan = plan_preparation(source, sizes, tokenizer=GPT2)
    threshold = 0 if with_held_out else plan.rule.threshold
    files = source.files if with_held_out else source.split()[0]
    documents = (
        document
        for group in deal(files, group_bytes=_GROUP_BYTES, shuffle=True)
        for share in group.shares
        for document in read(share, text_column=source.text_column)
    )
    seen, is_held_out = 0, False
    for chunks, _, _ in batch_chunks(documents, skip_bad or source.skips_bad, cuts):
        for chunk in chunks:
            if chunk.begins and seen >= max_bytes:
                return
            if chunk.begins:
                is_held_out = key_of(chunk.text.encode("utf-8", "surrogatepass")) < threshold
            if not is_held_out:
                # Halves of surrogate pairs are what they become in a preparation.
                text = chunk.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                yield text
                seen += len(text.encode())

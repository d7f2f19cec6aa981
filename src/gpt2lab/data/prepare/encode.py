"""Documents -> batches of ids, in order, by any number of worker processes."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np

from gpt2lab.data.prepare.sources import Source
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, gpt2_encoding

CHUNK_CHARS = 1 << 20
LONGEST_WORD = 16 * CHUNK_CHARS
_BATCH_CHARS = 1 << 19
_IN_FLIGHT = 8  # batches per worker: enough to keep it busy while a shard is hashed and flushed

# GPT-2 splits text into words by a pattern that looks ahead but never back, and no match of it crosses from a visible
# character into white space. So a text may be cut before any white space that follows a visible character: every
# word, and hence every id, stays the same. (Python's \s covers all of the pattern's own.)
_CUT = re.compile(r"(?<=\S)[ \n]")


@dataclass(frozen=True)
class Chunk:
    """A part of a document; `begins` marks its first, which <|endoftext|> precedes."""

    text: str
    begins: bool


def cut(blocks: Iterable[str], *, where: str) -> Iterator[Chunk]:
    """Cut a document, read in blocks of any length, into chunks of about a million characters.

    The ids of the chunks, joined, are exactly those of the full document. An empty document yields nothing.

    Raises: DataError on 16 million characters without a place to cut: not text.
    """
    held, begins = "", True
    for block in blocks:
        held += block
        while len(held) > CHUNK_CHARS:
            place = _CUT.search(held, CHUNK_CHARS)
            if place is None:
                if len(held) > LONGEST_WORD:
                    raise DataError(
                        f"{where}: {len(held):,} characters without white space; is this text?"
                    )
                break
            yield Chunk(held[: place.start()], begins)
            held, begins = held[place.start() :], False
    if held:
        yield Chunk(held, begins)


@dataclass(frozen=True)
class Place:
    """Where a source can be resumed: at a bookmark of its own, plus a number of chunks.

    `bad` and `empty` count the records left out before the bookmark.
    """

    bookmark: Any = None
    chunks: int = 0
    bad: int = 0
    empty: int = 0


@dataclass(frozen=True)
class Batch:
    """The ids of consecutive chunks, and their place in the source."""

    ids: np.ndarray  # (n,) uint16, <|endoftext|> before each document
    place: Place  # before the first chunk
    bad: int  # records left out so far; the last batch, without ids, has the totals
    empty: int


def encode(
    source: Source, *, start: Place, num_workers: int, skip_bad: bool
) -> Generator[Batch, None, None]:
    """Yield the source from `start` to its end; the batches do not depend on `num_workers`.

    Raises: DataError on a bad record (unless `skip_bad`, which counts it), or if a worker dies.
    """
    with contextlib.closing(_jobs(source, start, skip_bad)) as jobs:
        if num_workers == 1:
            for chunks, batch in jobs:
                yield replace(batch, ids=encode_chunks(chunks))
        else:
            yield from _encode_by_many(jobs, num_workers)


def _encode_by_many(
    jobs: Iterator[tuple[list[Chunk], Batch]], num_workers: int
) -> Generator[Batch, None, None]:
    workers = [_Worker() for _ in range(num_workers)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def on_idle_worker(chunks: list[Chunk]) -> np.ndarray:
        worker = idle.get()
        try:
            return worker.encode(chunks)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(num_workers)
    begun = ((threads.submit(on_idle_worker, chunks), batch) for chunks, batch in jobs)
    try:
        waiting = deque(itertools.islice(begun, _IN_FLIGHT * num_workers + 1))
        while waiting:
            future, batch = waiting.popleft()
            yield replace(batch, ids=future.result())
            waiting.extend(itertools.islice(begun, 1))
    finally:
        for worker in workers:
            worker.process.kill()  # ends a thread that waits for its answer
        threads.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """A tokenising process, on a pipe whose far end it alone holds.

    So the death of either side is an end of file for the other, even within a message. The executors of the standard
    library share one pipe for all results, and wait forever on the answer that a killed process had half written.
    """

    def __init__(self) -> None:
        context = get_context("spawn")  # a fork copies locks that threads of this process may hold
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_work, args=(far_end,), daemon=True)
        self.process.start()
        far_end.close()

    def encode(self, chunks: list[Chunk]) -> np.ndarray:
        try:
            self.pipe.send(chunks)
            ids = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                "a tokenising process died (out of memory?); run the same line again with fewer --num_workers"
            ) from error
        if isinstance(ids, Exception):
            raise ids
        return ids


def _work(pipe: Connection) -> None:
    """Answer each list of chunks with its ids; leave Ctrl+C to the parent, and end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            chunks = pipe.recv()
            try:
                pipe.send(encode_chunks(chunks))
            except Exception as error:  # raised again where the answer is awaited
                pipe.send(error)


def encode_chunks(chunks: list[Chunk]) -> np.ndarray:
    """Return the ids of some chunks, (n,) uint16."""
    encoding, arrays = gpt2_encoding(), [np.empty(0, np.uint16)]
    for chunk in chunks:
        if chunk.begins:
            arrays.append(np.array([END_OF_TEXT], np.uint16))
        try:
            ids = encoding.encode_to_numpy(chunk.text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair, from an escape in JSON
            text = chunk.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = encoding.encode_to_numpy(text, disallowed_special=())
        arrays.append(ids.astype(np.uint16))
    return np.concatenate(arrays)


def _jobs(
    source: Source, start: Place, skip_bad: bool
) -> Generator[tuple[list[Chunk], Batch], None, None]:
    """Group chunks by their length, so that a batch is the same work whatever the documents."""
    no_ids = np.empty(0, np.uint16)
    stream = _chunks(source, start, skip_bad)
    for _ in itertools.islice(stream, start.chunks):
        pass  # read again, but not tokenised again
    held: list[Chunk] = []
    begun, chars = start, 0
    for chunk, place, bad, empty in stream:
        if not held:
            begun = place
        if chunk is not None:
            held.append(chunk)
            chars += len(chunk.text)
        if chars >= _BATCH_CHARS or chunk is None:
            yield held, Batch(no_ids, begun, bad, empty)
            held, chars = [], 0


def _chunks(
    source: Source, start: Place, skip_bad: bool
) -> Iterator[tuple[Chunk | None, Place, int, int]]:
    """Yield each chunk, its place, and how many records were left out before it; None at the end."""
    place = replace(start, chunks=0)
    bad, empty = start.bad, start.empty
    for document in source.documents(start.bookmark):
        is_empty = True
        try:
            if isinstance(document, DataError):
                raise document
            if document.bookmark is not None:
                place = Place(document.bookmark, 0, bad, empty)
            for chunk in cut(document.blocks, where=document.where):
                is_empty = False
                yield chunk, place, bad, empty
                place = replace(place, chunks=place.chunks + 1)
            empty += is_empty
        except DataError:  # also in the rest of a document that began well
            if not skip_bad:
                raise
            bad += 1
    yield None, place, bad, empty

"""Pieces of text -> batches of ids, in order, by any number of processes."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np

from gpt2lab.data.chunks import Piece, cut
from gpt2lab.data.sources import Source
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, gpt2_encoding

_BATCH_CHARS = 1 << 19
_IN_FLIGHT = 8  # batches per process: enough to keep it busy while a shard is hashed and flushed


@dataclass(frozen=True)
class Place:
    """Where a source can be taken up again: after a bookmark of its own and some pieces.

    `bad` and `empty` count the records left out before the bookmark.
    """

    bookmark: Any = None
    pieces: int = 0
    bad: int = 0
    empty: int = 0


@dataclass(frozen=True)
class Batch:
    """The ids of some consecutive pieces, and where they stand in the source."""

    ids: np.ndarray  # (n,) uint16, <|endoftext|> before each document
    place: Place  # before the first piece
    bad: int  # records left out so far; the last batch, without ids, has the totals
    empty: int


def encode(
    source: Source, *, start: Place, num_workers: int, skip_bad: bool
) -> Generator[Batch, None, None]:
    """Yield the whole source from `start` on; what is yielded does not depend on `num_workers`.

    Raises: DataError on a bad record (unless `skip_bad`, which counts it), or if a process dies.
    """
    with contextlib.closing(_jobs(source, start, skip_bad)) as jobs:
        if num_workers == 1:
            for pieces, unread in jobs:
                yield replace(unread, ids=encode_pieces(pieces))
        else:
            yield from _encode_by_many(jobs, num_workers)


def _encode_by_many(
    jobs: Iterator[tuple[list[Piece], Batch]], num_workers: int
) -> Generator[Batch, None, None]:
    workers = [_Worker() for _ in range(num_workers)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def by_the_next(pieces: list[Piece]) -> np.ndarray:
        worker = idle.get()
        try:
            return worker.encode(pieces)
        finally:
            idle.put(worker)

    waiting: deque[tuple[Future[np.ndarray], Batch]] = deque()
    threads = ThreadPoolExecutor(num_workers)
    try:
        for pieces, unread in jobs:
            waiting.append((threads.submit(by_the_next, pieces), unread))
            if len(waiting) > _IN_FLIGHT * num_workers:
                future, unread = waiting.popleft()
                yield replace(unread, ids=future.result())
        while waiting:
            future, unread = waiting.popleft()
            yield replace(unread, ids=future.result())
    finally:
        for worker in workers:
            worker.process.kill()  # ends a thread that waits for its answer
        threads.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """A process that tokenises, on a pipe whose far end it alone holds.

    So the death of either side is an end of file for the other, even within a message. The executors of the standard
    library share one pipe for all results, and wait for ever on the answer that a killed process had half written.
    """

    def __init__(self) -> None:
        context = get_context("spawn")  # a fork copies locks that threads of this process may hold
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_work, args=(far_end,), daemon=True)
        self.process.start()
        far_end.close()

    def encode(self, pieces: list[Piece]) -> np.ndarray:
        try:
            self.pipe.send(pieces)
            ids = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                "a tokenising process died (out of memory?); run the same line again with fewer --num_workers"
            ) from error
        if isinstance(ids, Exception):
            raise ids
        return ids


def _work(pipe: Connection) -> None:
    """Answer each list of pieces with its ids; leave Ctrl+C to the parent, and end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            pieces = pipe.recv()
            try:
                pipe.send(encode_pieces(pieces))
            except Exception as error:  # raised again where the answer is awaited
                pipe.send(error)


def encode_pieces(pieces: list[Piece]) -> np.ndarray:
    """Return the ids of some pieces, (n,) uint16."""
    encoding, parts = gpt2_encoding(), [np.empty(0, np.uint16)]
    for piece in pieces:
        if piece.begins:
            parts.append(np.array([END_OF_TEXT], np.uint16))
        try:
            ids = encoding.encode_to_numpy(piece.text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair, from an escape in JSON
            text = piece.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = encoding.encode_to_numpy(text, disallowed_special=())
        parts.append(ids.astype(np.uint16))
    return np.concatenate(parts)


def _jobs(
    source: Source, start: Place, skip_bad: bool
) -> Generator[tuple[list[Piece], Batch], None, None]:
    """Group pieces by their length, so that a batch is the same work whatever the documents."""
    nothing = np.empty(0, np.uint16)
    stream = _pieces(source, start, skip_bad)
    for _ in itertools.islice(stream, start.pieces):
        pass  # read again, but not tokenised again
    held: list[Piece] = []
    begun, chars = start, 0
    for piece, place, bad, empty in stream:
        if not held:
            begun = place
        if piece is not None:
            held.append(piece)
            chars += len(piece.text)
        if chars >= _BATCH_CHARS or piece is None:
            yield held, Batch(nothing, begun, bad, empty)
            held, chars = [], 0


def _pieces(
    source: Source, start: Place, skip_bad: bool
) -> Iterator[tuple[Piece | None, Place, int, int]]:
    """Yield each piece, its place, and how many records were left out before it; None at the end."""
    place = replace(start, pieces=0)
    bad, empty = start.bad, start.empty
    for document in source.documents(start.bookmark):
        if isinstance(document, DataError):
            if not skip_bad:
                raise document
            bad += 1
            continue
        if document.bookmark is not None:
            place = Place(document.bookmark, 0, bad, empty)
        is_empty = True
        try:
            for piece in cut(document.chunks, where=document.where):
                is_empty = False
                yield piece, place, bad, empty
                place = replace(place, pieces=place.pieces + 1)
        except DataError:  # of the rest of a document that began well
            if not skip_bad:
                raise
            bad += 1
            continue
        empty += is_empty
    yield None, place, bad, empty

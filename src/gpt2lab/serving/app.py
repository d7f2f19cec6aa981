"""The HTTP side of `gpt2lab serve`: one model, one thread that draws, requests take turns.

The event loop only reads, checks and sends, so it answers while the model draws.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import re
import threading
import traceback
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gpt2lab.evaluation.completion import Completer
from gpt2lab.runs.target import was_tuned
from gpt2lab.serving.api import Choice, CompletionRequest, Problem, Reply, no_model, read_request
from gpt2lab.tokenizers.chat_template import can_be_written

_PAGE = Path(__file__).with_name("serve.html")
_MOST_BYTES = 2**20  # of a body
_BODY_SECONDS = 30.0
_LOCAL = {"localhost", "127.0.0.1", "::1"}


class Job:
    """The drawing of one request: rows of (prompt, its next ids) arrive in `rows`, then None."""

    def __init__(self) -> None:
        self.rows: asyncio.Queue[tuple[int, list[int]] | None] = asyncio.Queue()
        self.stopped = threading.Event()
        self.done: asyncio.Future[None]

    def stop(self) -> None:
        """End it before its next token, or before it begins."""
        self.stopped.set()
        self.done.cancel()
        self.rows.put_nowait(None)


class Engine:
    """The thread that draws, and the jobs that wait for it."""

    def __init__(self, completer: Completer, max_waiting: int) -> None:
        self.completer, self.max_waiting = completer, max_waiting
        self.jobs: set[Job] = set()  # drawing or waiting
        self._watchers: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draw")

    def start(self, ask: CompletionRequest, request: Request) -> Job:
        """Queue a request; it ends when its client is gone.

        Raises: Problem if too many wait.
        """
        if len(self.jobs) > self.max_waiting:
            message = f"{self.max_waiting} requests wait already; try again later"
            raise Problem(503, message, code="overloaded")
        job, loop = Job(), asyncio.get_running_loop()

        def tell(row: tuple[int, list[int]] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(job.rows.put_nowait, row)

        def work() -> None:
            try:
                for number, ids in enumerate(ask.prompts):
                    # Every prompt's first choice is what `gpt2lab sample` draws with this seed.
                    drawn = self.completer.draw(ids, 0, list(range(ask.n)), ask.style)
                    with contextlib.closing(drawn):
                        while not job.stopped.is_set() and (row := next(drawn, None)):
                            tell((number, row))
            finally:
                tell(None)

        job.done = loop.run_in_executor(self._thread, work)
        self.jobs.add(job)
        job.done.add_done_callback(lambda _: self.jobs.discard(job))
        watcher = asyncio.create_task(_stop_when_gone(job, request))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return job

    def stop(self) -> None:
        """Let every job end before its next token; safe in a signal handler."""
        for job in list(self.jobs):
            job.stopped.set()

    def close(self) -> None:
        """Stop all jobs and wait for the thread."""
        self.stop()
        self._thread.shutdown(cancel_futures=True)


async def _stop_when_gone(job: Job, request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.stop()


async def _texts(
    job: Job, ask: CompletionRequest, choices: list[Choice]
) -> AsyncGenerator[tuple[Choice, str], None]:
    """Yield new text of the choices, and each choice at its end."""
    try:
        while (found := await job.rows.get()) is not None:
            number, row = found
            of_prompt = choices[number * ask.n : (number + 1) * ask.n]
            for choice, id in zip(of_prompt, row, strict=True):
                had_ended = choice.finish
                new = choice.push(id)
                if new or choice.finish != had_ended:
                    yield choice, new
            if all(choice.finish for choice in choices):
                return
        await asyncio.wait([job.done])
        if not job.done.cancelled():
            job.done.result()  # raises what the thread raised
        raise Problem(503, "the server is shutting down")
    finally:
        job.stop()


def build_app(
    completer: Completer, name: str, *, token: str | None, host: str, max_waiting: int
) -> tuple[Starlette, Engine]:
    """Return the application that serves a model under `name`, and its engine, to close at the end."""
    engine = Engine(completer, max_waiting)
    can_chat = was_tuned(completer.target) and can_be_written(completer.tokenizer)
    card = {"id": name, "object": "model", "created": 0, "owned_by": "gpt2lab"}
    card |= {"max_model_len": completer.context_length, "can_chat": can_chat}

    def check(request: Request) -> None:
        """Reject a request without the token or, where none is set, one that another site sends through a browser."""
        if token is not None:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {token}".encode()):
                why = "send the header Authorization: Bearer TOKEN"
                raise Problem(401, why, code="invalid_api_key")
            return
        asked = request.headers.get("host", "")
        if _host(f"//{asked}") not in _LOCAL | {host}:
            raise Problem(403, "the Host header is not this machine's name")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != asked:
            raise Problem(403, "another site may not use this server")

    async def models(request: Request) -> Response:
        check(request)
        if (asked := request.path_params.get("name", name)) != name:
            raise no_model(asked, name)
        is_list = not request.path_params
        return _json({"object": "list", "data": [card]} if is_list else card)

    async def health(request: Request) -> Response:
        return _json({"status": "ok", "requests": len(engine.jobs)})

    async def completions(request: Request) -> Response:
        return await answer(request, is_chat=False)

    async def chat_completions(request: Request) -> Response:
        if not can_chat:
            check(request)
            why = f"{name} was not fine-tuned on conversations; use /v1/completions"
            raise Problem(400, why, param="model")
        return await answer(request, is_chat=True)

    async def answer(request: Request, *, is_chat: bool) -> Response:
        check(request)
        try:
            content = await asyncio.wait_for(_body(request), _BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Problem(408, f"no full body within {_BODY_SECONDS:.0f} s") from None
        ask = read_request(content, completer, name, is_chat=is_chat)
        job, reply = engine.start(ask, request), Reply(ask, name)
        choices = [
            Choice(index, completer.tokenizer, ask.stop, ask.style.max_new_tokens)
            for index in range(len(ask.prompts) * ask.n)
        ]
        if ask.stream:
            events = _events(job, reply, choices)
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        async for _ in _texts(job, ask, choices):
            pass
        return _json(reply.full(choices))

    return (
        Starlette(
            routes=[
                Route("/", _page),
                Route("/health", health),
                Route("/v1/models", models),
                Route("/v1/models/{name:path}", models),
                Route("/v1/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys((Problem, HTTPException, Exception), _answer_error),
        ),
        engine,
    )


def _host(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


async def _body(request: Request) -> bytes:
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > _MOST_BYTES:
            raise Problem(413, f"the body is larger than {_MOST_BYTES} bytes")
    return content


async def _events(job: Job, reply: Reply, choices: list[Choice]) -> AsyncIterator[str]:
    try:
        for document in reply.opening(choices):
            yield _event(document)
        async with contextlib.aclosing(_texts(job, reply.ask, choices)) as texts:
            async for choice, new in texts:
                yield _event(reply.chunk(choice, new))
        for document in reply.closing(choices):
            yield _event(document)
    except Problem as problem:  # the status has been sent
        yield _event(problem.body)
    except Exception:
        traceback.print_exc()
        yield _event(Problem(500, "the server failed; its terminal says why").body)
    yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def _json(document: dict[str, Any], status: int = 200) -> Response:
    # ASCII: half of a surrogate pair, which a client may send and UTF-8 cannot, goes back as it came.
    return Response(json.dumps(document).encode(), status, media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer an error in OpenAI's shape: a Problem, starlette's own, or a bug, whose traceback starlette prints."""
    if isinstance(error, HTTPException):
        error = Problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    elif not isinstance(error, Problem):
        error = Problem(500, "the server failed; its terminal says why")
    response = _json(error.body, error.status)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _page(request: Request) -> Response:
    """Return the chat page; its policy allows its own style and script, by their hashes, and this server."""
    page = _PAGE.read_text(encoding="utf-8")
    style, script = (
        "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
        for text in re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", page, flags=re.S)
    )
    policy = f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; "
    policy += "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
    headers |= {"referrer-policy": "no-referrer", "cache-control": "no-store"}
    return Response(page, headers=headers, media_type="text/html")

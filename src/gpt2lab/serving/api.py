"""OpenAI's completion requests that one model can answer, and the JSON of its answers. No torch, no network.

What a request asks for is done or rejected, never ignored: a parameter that this server does not know or support must
be absent, null or at the value that changes nothing.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpt2lab.errors import DataError
from gpt2lab.evaluation.completion import Completer, SamplingParams
from gpt2lab.tokenizers import chat_template
from gpt2lab.tokenizers.chat_template import Turn
from gpt2lab.tokenizers.interface import Tokenizer

MOST_CHOICES = 16  # of one request: prompts times n
_MOST_STOPS, _LONGEST_STOP = 4, 256  # characters
_DEFAULT_TOKENS = 16  # of /v1/completions, as at OpenAI; a chat answer may fill the context
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0, 0.0)),
    **dict.fromkeys(("echo", "logprobs", "store"), (False,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **{"best_of": (1,), "suffix": ("",), "logit_bias": ({},), "modalities": (["text"],)},
    **{"parallel_tool_calls": (True, False), "response_format": ({"type": "text"},)},
    **{"service_tier": ("auto", "default"), "top_logprobs": (0,), "reasoning_effort": ("none",)},
}
# They identify the client, and are ignored.
_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
_READ = {"model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "stream"}
_READ |= {"stream_options"}


class Problem(Exception):
    """A request that is not answered: its HTTP status and OpenAI's error object."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 403: "permission_error", 503: "overloaded_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request."""

    is_chat: bool
    prompts: list[list[int]]  # ids, each at most the context long
    n: int  # choices of each prompt
    style: SamplingParams
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


def read_request(
    content: bytes, completer: Completer, name: str, *, is_chat: bool
) -> CompletionRequest:
    """Return what the body of a request asks of the model `name`.

    Raises: Problem.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise Problem(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise Problem(400, "the body is not a JSON object")
    known = _READ | {"messages", "max_completion_tokens"} if is_chat else _READ | {"prompt"}
    for key, value in body.items():
        if key in known or key in _LABELS or value is None:
            continue
        neutral = _NEUTRAL.get(key, ())
        if not any(type(value) is type(one) and value == one for one in neutral):
            what = "has no parameter" if key not in _NEUTRAL else "does not support the value of"
            raise Problem(
                400, f"this server {what} {key:.100}", param=key, code="unsupported_parameter"
            )
    if not isinstance(body.get("model"), str):
        raise Problem(400, f"model must be {name!r}", param="model")
    if body["model"] != name:
        raise no_model(body["model"], name)
    prompts = _prompts(body, completer, is_chat=is_chat)
    n = _number(body, "n", 1, 1, MOST_CHOICES)
    if len(prompts) * n > MOST_CHOICES:
        raise Problem(400, f"prompts times n is at most {MOST_CHOICES}", param="n")
    stream = _flag(body, "stream")
    options = body.get("stream_options") or {}
    if (
        not isinstance(options, dict)
        or options.keys() - {"include_usage"}
        or (options and not stream)
    ):
        wanted = 'stream_options is {"include_usage": true} or false, with stream'
        raise Problem(400, wanted, param="stream_options")
    longest = max(map(len, prompts))
    temperature = _number(body, "temperature", SamplingParams.temperature, 0, 2, float)
    return CompletionRequest(
        is_chat=is_chat,
        prompts=prompts,
        n=n,
        style=SamplingParams(
            _max_tokens(body, longest, completer.context_length, is_chat=is_chat),
            # So small that only the likeliest token is left, it is 0.
            temperature=temperature if temperature >= 1e-5 else 0.0,
            top_k=_number(body, "top_k", SamplingParams.top_k, 0, 2**31),
            top_p=_number(body, "top_p", SamplingParams.top_p, 1e-6, 1, float),
            seed=_number(body, "seed", secrets.randbits(31), -(2**63), 2**63 - 1),
        ),
        stop=_stops(body.get("stop")),
        stream=stream,
        include_usage=_flag(options, "include_usage"),
    )


def no_model(asked: str, name: str) -> Problem:
    """Return the problem of a request for another model."""
    message = f"model {asked!r:.200} not found; this server has {name!r}"
    return Problem(404, message, param="model", code="model_not_found")


def _number(
    body: dict[str, Any], key: str, default: Any, least: float, most: float, kind: type = int
) -> Any:
    value = body.get(key)
    if value is None:
        return default
    wanted = int if kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, wanted) or not least <= value <= most:
        noun = "an integer" if kind is int else "a number"
        raise Problem(400, f"{key} must be {noun} from {least} to {most}", param=key)
    return kind(value)


def _flag(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    if not isinstance(value, bool | None):
        raise Problem(400, f"{key} must be true or false", param=key)
    return bool(value)


def _max_tokens(body: dict[str, Any], longest: int, context: int, *, is_chat: bool) -> int:
    """Return the most tokens of an answer; the last one is drawn, not read, and needs no place in the context."""
    room = context + 1 - longest
    newer, key = "max_completion_tokens", "max_tokens"
    if body.get(newer) is not None:
        if body.get(key) is not None:
            raise Problem(
                400, f"{key} and {newer} are two names of one number; give one", param=key
            )
        key = newer
    asked: int | None = _number(body, key, None, 1, 2**31)
    if asked is not None and asked > room:
        raise _too_long(f"the prompt has {longest} tokens and {key} is {asked}", context, key)
    return asked or (room if is_chat else min(room, _DEFAULT_TOKENS))


def _too_long(what: str, context: int, param: str) -> Problem:
    message = f"{what}; the model's context holds {context} tokens"
    return Problem(400, message, param=param, code="context_length_exceeded")


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if (
        not isinstance(texts, list)
        or len(texts) > _MOST_STOPS
        or not all(isinstance(one, str) and 0 < len(one) <= _LONGEST_STOP for one in texts)
    ):
        message = f"stop must be up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters"
        raise Problem(400, message, param="stop")
    return tuple(texts)


def _prompts(body: dict[str, Any], completer: Completer, *, is_chat: bool) -> list[list[int]]:
    """Return the ids of the prompts, each at least one and none longer than the context."""
    tokenizer, context = completer.tokenizer, completer.context_length
    param = "messages" if is_chat else "prompt"
    longest = context * int(tokenizer.byte_lengths().max())  # bytes of a text that can fit

    def encode(text: str) -> list[int]:
        if len(text) > longest:
            raise _too_long("the prompt is too long", context, param)
        return completer.ids_of(text)

    try:
        if is_chat:
            turns = _turns(body.get("messages"))
            if sum(len(turn.text) for turn in turns) > longest:
                raise _too_long("the conversation is too long", context, param)
            found = [chat_template.encode(turns, tokenizer)[0]]
        else:
            found = [
                one if isinstance(one, list) else encode(one)
                for one in _texts_or_ids(body.get("prompt"), tokenizer.size)
            ]
    except DataError as error:  # this tokenizer has no ids for such a text
        raise Problem(400, str(error), param=param) from error
    for ids in found:
        if len(ids) > context:
            raise _too_long(f"the prompt has {len(ids)} tokens", context, param)
    return [ids or [tokenizer.end_of_text] for ids in found]


def _texts_or_ids(prompt: Any, size: int) -> list[str | list[int]]:
    def is_ids(one: Any) -> bool:
        return isinstance(one, list) and all(type(id) is int and 0 <= id < size for id in one)

    given = prompt if isinstance(prompt, list) and prompt and not is_ids(prompt) else [prompt]
    if not all(isinstance(one, str) or is_ids(one) for one in given):
        message = f"prompt must be a text, a list of token ids below {size}, or a list of these"
        raise Problem(400, message, param="prompt")
    if len(given) > MOST_CHOICES:
        raise Problem(400, f"at most {MOST_CHOICES} prompts", param="prompt")
    return given


def _turns(messages: Any) -> tuple[Turn, ...]:
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise Problem(400, "messages must be a list of objects", param="messages")
    turns = [Turn(_role(one.get("role")), _content(one.get("content"))) for one in messages]
    try:
        return chat_template.alternating(turns, last="user")
    except ValueError as error:
        raise Problem(400, f"messages: {error}", param="messages") from error


def _role(role: Any) -> str:
    if role not in ("system", "developer", "user", "assistant"):
        message = "the role of a message must be system, developer, user or assistant"
        raise Problem(400, message, param="messages")
    return "system" if role == "developer" else str(role)


def _content(content: Any) -> str:
    """Return the text of a message: a string, or a list of parts of type text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    ):
        raise Problem(400, "the content of a message must be text", param="messages")
    text = "".join(part["text"] for part in parts)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip()


@dataclass
class Choice:
    """One text as it grows: the part that may be sent, and why it ended."""

    index: int
    tokenizer: Tokenizer
    stop: Sequence[str]
    most: int  # tokens
    before: Sequence[int] = ()  # ids that the text is decoded after
    ids: list[int] = field(default_factory=list)
    text: str = ""  # sent so far
    finish: str | None = None  # stop | length

    def push(self, id: int) -> str:
        """Take the next id; return what can be sent now.

        Held back is an incomplete character, and what may be the beginning of a stop text.
        """
        if self.finish:
            return ""
        if id == self.tokenizer.end_of_text:
            self.finish = "stop"
        else:
            self.ids.append(id)
            self.finish = "length" if len(self.ids) == self.most else None
        text = self.tokenizer.decode_after(self.before, self.ids)
        if cuts := [at for stop in self.stop if (at := text.find(stop)) >= 0]:
            text, self.finish = text[: min(cuts)], "stop"
        if not self.finish:
            text = text.rstrip("\ufffd")
            text = text[: len(text) - max((_begun(text, stop) for stop in self.stop), default=0)]
            if not text.startswith(self.text):
                return ""
        new = text[len(self.text) :]
        self.text += new
        return new


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop text."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)


class Reply:
    """The JSON of an answer, in full or in chunks."""

    def __init__(self, wanted: CompletionRequest, name: str) -> None:
        self.wanted = wanted
        self._common = {
            "id": f"{'chatcmpl' if wanted.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }

    def full(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the whole answer."""
        kind = "chat.completion" if self.wanted.is_chat else "text_completion"
        found = []
        for one in choices:
            message = {"role": "assistant", "content": one.text, "refusal": None}
            text = {"message": message} if self.wanted.is_chat else {"text": one.text}
            found.append(_choice(one, text, one.finish))
        return {**self._common, "object": kind, "choices": found, "usage": self._usage(choices)}

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Return the chunks before the first text: of a chat, the roles."""
        if not self.wanted.is_chat:
            return []
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk([_choice(one, delta, None)]) for one in choices]

    def chunk(self, choice: Choice, new: str) -> dict[str, Any]:
        """Return the chunk with new text, or with the end, of one choice."""
        text = {"delta": {"content": new} if new else {}} if self.wanted.is_chat else {"text": new}
        return self._chunk([_choice(choice, text, choice.finish)])

    def closing(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Return the chunk of the usage, if it was asked for."""
        usage = {"usage": self._usage(choices)}
        return [self._chunk([]) | usage] if self.wanted.include_usage else []

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.wanted.is_chat else "text_completion"
        usage = {"usage": None} if self.wanted.include_usage else {}
        return {**self._common, "object": kind, "choices": choices, **usage}

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        read, drawn = sum(map(len, self.wanted.prompts)), sum(len(one.ids) for one in choices)
        return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def _choice(choice: Choice, text: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": choice.index, **text, "logprobs": None, "finish_reason": finish}

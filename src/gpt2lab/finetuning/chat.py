"""A conversation with a fine-tuned model; earlier turns are its context."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.completion import Completer
from gpt2lab.tokenizers import chat_template
from gpt2lab.tokenizers.chat_template import Turn


@dataclass
class Chat:
    """The turns so far, as many as fit into the context together with the next answer."""

    completer: Completer
    plain: bool = False  # without the template: the model continues the turns as lines of text
    system: str = ""  # before the first turn that is kept, also when earlier turns were dropped
    turns: list[Turn] = field(default_factory=list)
    number: int = 0  # of answers: each is sampled with its own generator

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer as it is generated; question and answer join the turns.

        The oldest exchanges are dropped until `max_new_tokens`, or half the context, are free for the answer.

        Raises: ConfigError if the question alone does not fit.
        """
        limit, wanted = self.completer.context_length, self.completer.style.max_new_tokens
        kept = [*self.turns, Turn("user", text.strip())]
        ids = self._encode(kept)
        while len(ids) + min(wanted, limit // 2) > limit and len(kept) > 1:
            kept = kept[2:]
            ids = self._encode(kept)
        if len(ids) > limit:
            with_system = " with the system message" if self.system else ""
            raise ConfigError(
                f"the question has {len(ids)} tokens{with_system}, the model's context holds {limit}; shorten it"
            )
        return self._answer(kept, ids, at_most=min(wanted, limit - len(ids) + 1))

    def _encode(self, turns: list[Turn]) -> list[int]:
        tokenizer = self.completer.tokenizer
        if self.system:
            turns = [Turn("system", self.system), *turns]
        if self.plain:
            return tokenizer.encode("".join(f"{turn.text}\n" for turn in turns))
        ids, _ = chat_template.encode(turns, tokenizer)
        return ids

    def _answer(self, kept: list[Turn], ids: list[int], *, at_most: int) -> Iterator[str]:
        answer = ""
        for text in self.completer.stream(ids, number=self.number, place=0, at_most=at_most):
            answer += text
            yield text
        self.turns = [*kept, Turn("assistant", answer.strip())]
        self.number += 1

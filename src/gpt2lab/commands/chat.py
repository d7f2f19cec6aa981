r"""Chat with a fine-tuned run, checkpoint or export, line by line; also from a pipe.

gpt2lab chat my_tuned_run
gpt2lab chat my_tuned_run --system "Answer in one word."
printf 'Hello!\nWho are you?\n' | gpt2lab chat my_tuned_run --temperature 0
"""

from dataclasses import dataclass

from gpt2lab.commands.parser import AmongRuns, OnDevice, parse_flags
from gpt2lab.commands.sample import load, typed_lines
from gpt2lab.config.flags import TARGET, argument, option
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.evaluation.completion import SamplingParams
from gpt2lab.runs.console import say
from gpt2lab.runs.target import was_tuned
from gpt2lab.tokenizers.chat_template import can_be_written

_HELP = "/reset clears the conversation, /quit ends"


@dataclass(frozen=True)
class Talk(AmongRuns, OnDevice):
    """Chat with a model that was fine-tuned with `gpt2lab finetune`: /reset clears the conversation, /quit ends."""

    target: str = argument(TARGET)
    system: str = option("", "system message before the conversation, as training had it")
    style: SamplingParams = option(
        SamplingParams(max_new_tokens=200, temperature=0.7), "how an answer is drawn"
    )


def main(argv: list[str]) -> int:
    """Load the model and answer until the input ends."""
    flags = parse_flags(Talk, argv)
    completer = load(flags, flags.style)
    from gpt2lab.finetuning.chat import Chat  # torch

    plain = False
    if not was_tuned(completer.target):
        plain = not can_be_written(completer.tokenizer)
        how = ", line by line: its tokenizer cannot write the chat template" if plain else ""
        say(
            f"warning: {flags.target} was not fine-tuned on conversations: it continues text{how}, so its answers "
            f"mean little; see gpt2lab finetune"
        )
    say(_HELP)
    chat = Chat(completer, plain, flags.system.strip())
    for line in typed_lines():
        text = line.strip()
        if text == "/quit":
            break
        if text == "/reset":
            chat.turns = []
        elif text.startswith("/"):
            say(_HELP)
        elif text:
            before = len(chat.turns)
            try:
                for part in chat.ask(text):
                    print(part, end="", flush=True)
            except (ConfigError, DataError) as error:
                say(f"error: {error}")
                continue
            print()
            if dropped := before + 2 - len(chat.turns):
                say(
                    f"({dropped // 2} earlier exchanges did not fit into the context and were dropped)"
                )
    return 0

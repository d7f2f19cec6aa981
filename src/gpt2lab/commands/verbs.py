"""`gpt2lab VERB`: every verb and its function. The programs in scripts/ and src/ call the same functions."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

from gpt2lab import __version__, fmt, paths
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Verb:
    """What a verb does, in one line, and the function that does it: called with argv, returns the exit code."""

    about: str
    module: str
    function: str = "main"


GROUPS = {
    "data": {
        "prepare": Verb("tokenize text into the shards that training reads", ".prepare_data"),
        "data": Verb("verify, show, import and merge shards; tokenizers", ".data"),
    },
    "train": {
        "train": Verb("train a model, or continue a run", ".train"),
        "finetune": Verb("fine-tune a model on conversations", ".train", "finetune"),
        "estimate": Verb("predict time, memory, cost and loss of a run", ".estimate_time"),
        "doctor": Verb("check this machine, and the memory of a run", ".doctor"),
    },
    "look": {
        "status": Verb("show all runs and how far they are", ".status"),
        "runs": Verb("list, verify, delete, archive, import, sync runs", ".runs"),
        "report": Verb("write a run's report as one HTML page", ".plot", "report"),
        "plot": Verb("draw the curves of runs", ".plot"),
    },
    "evaluate": {
        "evaluate": Verb("measure validation loss, HellaSwag and CORE", ".evaluate"),
        "sample": Verb("continue prompts with a model", ".sample"),
        "chat": Verb("chat with a fine-tuned model", ".chat"),
        "serve": Verb("try a model in the browser, or by OpenAI's API", ".serve"),
        "export": Verb("write a model for transformers or llama.cpp", ".export_hf"),
    },
    "compare": {
        "compare": Verb("tell whether two evaluations differ", ".compare"),
        "ablate": Verb("compare settings over several seeds", ".ablate"),
        "ladder": Verb("fit a scaling law, predict a larger run", ".ladder"),
    },
    "tools": {
        "replay": Verb("replay steps of a run, exactly or with a change", ".replay"),
        "why-spike": Verb("name the samples behind a spike", ".replay", "why_spike"),
        "bisect": Verb("find the first difference of two runs", ".replay", "bisect"),
    },
}
if (paths.REPOSITORY / "benchmarks" / "command.py").is_file():  # not shipped
    GROUPS["tools"]["benchmark"] = Verb(
        "measure this machine and other trainers", "benchmarks.command"
    )
# Verbs within a verb that have a module of their own.
WITHIN = {
    "data tokenizer": Verb("learn a tokenizer from text, or show one", ".tokenizer"),
    "runs average": Verb("average the last checkpoints of a run", ".average"),
    "runs import": Verb("import a checkpoint of nanoGPT", ".runs", "import_checkpoint"),
    "runs resume-command": Verb("print the command that continues a run", ".resume_command"),
    "runs tensorboard": Verb("start or stop TensorBoard", ".show_tensorboard"),
}
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}
# Verbs of earlier versions, and those that are typed without the verb that they belong to.
GONE = {
    **{name.partition(" ")[2]: name for name in WITHIN},
    **{name: f"data {name}" for name in ("merge", "stats", "show", "verify")},
    **{name: f"runs {name}" for name in ("list", "rm", "archive", "sync")},
    **{name: f"runs {name}" for name in ("rebuild-tensorboard", "repair-log")},
    **{"preflight": "train --preflight", "gpu-info": "doctor", "env": "doctor [RUN]"},
    **{"memory-check": "doctor --model NAME", "resume": "train --resume latest"},
    "generate": "sample",
}

_PAGE = """gpt2lab {version}: train GPT-2 from scratch

  gpt2lab prepare python-stdlib
  gpt2lab train --model gpt2-nano --max_steps 200 --run_name first
  gpt2lab sample first --prompt "def "

{verbs}

gpt2lab VERB --help: common flags and examples; --help-all: every flag"""


def main(argv: list[str]) -> int:
    """Do what the verb says and return the exit code.

    Raises: ConfigError for a verb that does not exist.
    """
    if argv[:1] == ["help"]:
        return main([*argv[1:], "--help"])
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        lines: list[str] = []
        for group, members in GROUPS.items():
            lines += ["", f"{group}:", *(f"  {n:<12} {verb.about}" for n, verb in members.items())]
        print(_PAGE.format(version=__version__, verbs="\n".join(lines[1:])))
        return 0
    if argv[0] == "--version":
        print(f"gpt2lab {__version__}")
        return 0
    name, both = (" ".join(argv[:count]).replace("_", "-") for count in (1, 2))
    if name in GONE:
        raise ConfigError(f"gpt2lab {name}: it is gpt2lab {GONE[name]}")
    if name not in VERBS:
        hint = fmt.did_you_mean(name, VERBS, "gpt2lab --help lists them")
        raise ConfigError(f"unknown verb {argv[0]!r}: {hint}")
    if name == "benchmark":
        sys.path.insert(0, str(paths.REPOSITORY))
    verb = WITHIN.get(both, VERBS[name])
    module = importlib.import_module(verb.module, "gpt2lab.commands")
    return int(getattr(module, verb.function)(argv[1 + (both in WITHIN) :]))


def within(verb: str) -> dict[str, str]:
    """Return what the verbs within a verb do that have a module of their own."""
    return {
        name.removeprefix(f"{verb} "): one.about
        for name, one in WITHIN.items()
        if name.startswith(f"{verb} ")
    }

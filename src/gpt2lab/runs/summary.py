"""A run as text: the report at the end of a start, its checkpoints, and the commands that continue it. No torch."""

import contextlib
import importlib.util
import string
import time
from operator import itemgetter
from pathlib import Path
from typing import Literal

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog
from gpt2lab.config.presets import RATES
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import GPT2LabError
from gpt2lab.runs import history
from gpt2lab.runs.history import Log
from gpt2lab.tokenizers.chat_template import as_prompt

# Its characters; as ids, together with the template, about as long as its longer conversations.
_TEXT_OF_DEMO = f"{string.ascii_letters}{string.digits} ,.!?"


def describe_run(run_dir: Path) -> str:
    """Write a run's report: losses, speed, sample, checkpoints, and the commands that come next."""
    log = history.read_log(run_dir)
    samples = log.current("sample")
    rows = [*_losses(log)]
    if len(log.numbers):
        (rate, of), spent = log.typical_rate(), fmt.duration(log.seconds_in_steps())
        rows.append(("speed", f"{fmt.number(rate, ',.0f')} tokens/s ({of}), {spent} in steps"))
    if samples and max(samples) < log.numbers[-1]:  # that of the last step was just shown
        rows.append((f"sample of {max(samples)}", ""))
        rows += [("", line) for line in fmt.quoted(samples[max(samples)]["text"]).splitlines()]
    infos, _ = catalog.list_checkpoints(run_dir)
    if infos:
        rows.append(("checkpoints", ""))
        rows += [("", line) for line in checkpoint_table(infos).splitlines()]
        rows.append(("continue", command_to_continue(run_dir, log)))
    else:
        rows.append(("start again", "with the same command line: nothing was saved"))
    made = [] if (run_dir / "tensorboard").exists() else ["rebuild-tensorboard", run_dir.name]
    lines = [_command(run_dir, "runs", *words) for words in (made, ["tensorboard"]) if words]
    rows.append(("TensorBoard", " && ".join(lines)))
    if samples and log.has_ended:
        rows.append(("next", ""))
        rows += [("", command) for command in commands_after(run_dir)]
    lines = [f"  {name:<17} {text}".rstrip() if name else f"    {text}" for name, text in rows]
    return "\n".join(["", f"run {run_dir.name}", *lines])


def _losses(log: Log) -> list[tuple[str, str]]:
    rows, first, last = [], log.first_step(), log.last_step()
    if first is not None and last is not None:
        before, now = (fmt.number(event.get("loss")) for event in (first, last))
        tokens = fmt.number(last.get("tokens"), ",d")
        span = f"{before} at step {first['step']:,} -> {now} at step {last['step']:,}"
        rows.append(("training loss", f"{span} ({tokens} tokens)"))
    if evals := log.evals_of_data():
        begin, final, best = evals[0], evals[-1], min(evals, key=itemgetter("val_loss"))
        se = final.get("val_loss_se")
        error = "" if se is None else f" +- {se:.4f}"
        text = (
            f"{fmt.number(begin['val_loss'])} at step {begin['step']:,} -> {fmt.number(final['val_loss'])}{error} "
            f"at step {final['step']:,}; best {fmt.number(best['val_loss'])} at step {best['step']:,}"
        )
        rows.append(("validation loss", text))
        if log.average_loss is not None:
            rows.append(("", f"{fmt.number(log.average_loss)} with the mean of the last weights"))
        epochs = (log.step(final["step"]) or {}).get("epochs_by_source", {})
        rows += [
            ("", f"{name:<15} {fmt.number(loss)} after {epochs.get(name, 0.0):.2f} epochs")
            for name, loss in (final.get("val_loss_by_source") or {}).items()
        ]
    return rows


# -- the commands that come next -------------------------------------------------------------------------------------


def commands_after(run_dir: Path) -> list[str]:
    """Return commands for a complete run: continue prompts, in a browser too, write its report, fine-tune it."""
    name, serve = run_dir.name, _command(run_dir, "serve", run_dir.name)
    if importlib.util.find_spec("uvicorn") is None:
        serve = f"{paths.program('python')} -m pip install starlette uvicorn && {serve}"
    commands = [
        _command(run_dir, "sample", name, "--interactive"),
        serve,
        _command(run_dir, "report", name),
    ]
    if program_of(run_dir) == "finetune":
        return [_command(run_dir, "chat", name), *commands]
    if rates := _rates_of_demo(run_dir):
        words = ("--init_from", name, "--instructions", "demo", "--max_steps=300", *rates)
        begun = _command(run_dir, "finetune", *words, "--run_name", f"{name}_chat")
        commands.append(f"{begun} && {_command(run_dir, 'chat', f'{name}_chat')}")
    return commands


def _rates_of_demo(run_dir: Path) -> list[str]:
    """Return the flags with which a run learns the few conversations of `--instructions demo`: its own rates.

    No rates if its tokenizer cannot write them, or its context does not hold them.
    """
    with contextlib.suppress(GPT2LabError):
        tokenizer, config = history.read_tokenizer(run_dir), to_flat(history.read_config(run_dir))
        length = 0 if tokenizer is None else len(tokenizer.encode(as_prompt(_TEXT_OF_DEMO)))
        if 0 < length <= config["context_length"]:
            return [f"--{rate}={config[rate]:g}" for rate in RATES if config[rate] is not None]
    return []


def command_to_continue(run_dir: Path, log: Log) -> str:
    """Return the command that continues a run; a complete run gets more steps."""
    begin = log.last_begin
    command = command_to_resume(run_dir, world_size=begin["world_size"] if begin else 1)
    if begin is not None and log.has_ended:
        command += f" --max_steps {2 * begin['max_steps']} --allow_change max_steps"
    return command


def command_to_resume(run_dir: Path, *, world_size: int, anywhere: bool = False) -> str:
    """Return the command line that continues a run on this machine; `anywhere`: from another folder too."""
    words = ("--run_name", run_dir.name, "--resume", "latest")
    return _command(run_dir, program_of(run_dir), *words, processes=world_size, anywhere=anywhere)


def _command(
    run_dir: Path, verb: str, *words: str, processes: int = 1, anywhere: bool = False
) -> str:
    """Return a command line, with the folder of the runs if it is not the default one."""
    folder = run_dir.parent
    place = ["--checkpoint_dir", str(folder) if anywhere else paths.display_path(folder)]
    place *= anywhere or folder != paths.runs_folder(None)
    called = paths.command_words(verb, processes, anywhere=anywhere)
    return fmt.command_line([*called, *words, *place])


def program_of(run_dir: Path) -> Literal["train", "finetune"]:
    """Return the program that began a run: finetune if it has instructions."""
    settings = history.read_json(run_dir / "config.json") or {}  # not written yet
    return "train" if settings.get("instructions") is None else "finetune"


def checkpoint_table(infos: list[catalog.CheckpointInfo]) -> str:
    """Write checkpoints as a table, oldest first."""
    rows = [
        (
            f"{info.step:,}",
            ", ".join([info.kind, *(x for x in info.labels if not x.startswith(info.kind))]),
            fmt.number(info.val_loss),
            f"{info.tokens:,}",
            fmt.num_bytes(info.num_bytes),
            fmt.duration(max(0.0, time.time() - info.created)),
        )
        for info in infos
    ]
    return fmt.table(("step", "kind", "val loss", "tokens", "size", "age"), rows)

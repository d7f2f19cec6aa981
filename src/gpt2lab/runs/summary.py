"""The report at the end of every start, read from the run's metrics. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from gpt2lab import fmt, paths
from gpt2lab.checkpoint import catalog, listing
from gpt2lab.runs import history
from gpt2lab.runs.history import Log


def describe_run(run_dir: Path) -> str:
    """Write a run's report: losses, speed, sample, checkpoints, and the commands to go on."""
    log = history.read_log(run_dir)
    evals, samples = log.current("eval"), log.current("sample")
    last = log.last_step()
    lines = ["", f"run {run_dir.name}"]
    if last is not None:
        first = log.step(int(log.numbers[0])) or {}
        before, now = (fmt.number(event.get("loss")) for event in (first, last))
        lines.append(
            f"  training loss     {before} at step {first['step']:,} -> {now} at step {last['step']:,} "
            f"({fmt.number(last.get('tokens'), ',d')} tokens)"
        )
    measured = [event for event in evals.values() if event["val_loss"] is not None]
    if measured:
        final = evals[max(evals)]
        best = min(measured, key=lambda event: event["val_loss"])
        se = final.get("val_loss_se")
        error = "" if se is None else f" +- {se:.4f}"
        lines.append(
            f"  validation loss   {fmt.number(evals[min(evals)]['val_loss'])} at step {min(evals):,} -> "
            f"{fmt.number(final['val_loss'])}{error} at step {final['step']:,}; best {fmt.number(best['val_loss'])} "
            f"at step {best['step']:,}"
        )
        sources = final.get("val_loss_by_source") or {}
        passes = last.get("epochs_by_source", {}) if last else {}
        lines += [
            f"    {name:<15} {fmt.number(loss)} after {passes.get(name, 0.0):.2f} epochs"
            for name, loss in sources.items()
        ]
    if last is not None:
        seconds = float(np.nansum(log.column("step_seconds")))
        rate = float(np.nanmedian(log.column("tokens_per_second")))
        lines.append(
            f"  speed             {rate:,.0f} tokens/s (median step), {fmt.duration(seconds)} in steps"
        )
    if samples:
        lines.append(f"  sample            {samples[max(samples)]['text']!r}")
    infos, _ = catalog.list_checkpoints(run_dir)
    if infos:
        lines.append("  checkpoints")
        lines += ["    " + line for line in listing.checkpoint_table(infos).splitlines()]
        lines.append(f"  go on             {command_to_go_on(run_dir, log)}")
    else:
        lines.append("  begin again       with the same command line: nothing was saved")
    if (run_dir / "tensorboard").exists():
        words = [paths.program("tensorboard"), "--logdir", paths.display_path(run_dir.parent)]
        lines.append(f"  look at it        {fmt.command_line(words)}")
    else:
        then = fmt.command_line(paths.command_words("tensorboard"))
        lines.append(f"  look at it        train with --use_tensorboard, then: {then}")
    if samples and log.has_ended:
        lines += ["  next", *(f"    {command}" for command in commands_after(run_dir))]
    return "\n".join(lines)


def commands_after(run_dir: Path) -> list[str]:
    """Return what people do with a complete run: continue prompts, write its report, and teach it to answer."""
    name, folder = run_dir.name, []
    if run_dir.parent != paths.runs_folder(None):
        folder = ["--checkpoint_dir", paths.display_path(run_dir.parent)]

    def line(verb: str, *words: str) -> str:
        return fmt.command_line([*paths.command_words(verb), *words, *folder])

    commands = [line("sample", name, "--interactive"), line("report", name)]
    if program_of(run_dir) == "finetune":
        return [line("chat", name), *commands]
    words = ["--init_from", name, "--instructions", "demo", "--run_name", f"{name}_chat"]
    return [*commands, f"{line('finetune', *words)} && {line('chat', f'{name}_chat')}"]


def command_to_go_on(run_dir: Path, log: Log) -> str:
    """Return the command that continues a run; a complete run gets more steps."""
    begin = log.last_begin
    command = command_to_resume(run_dir, world_size=begin["world_size"] if begin else 1)
    if begin is not None and log.has_ended:
        command += f" --max_steps {2 * begin['max_steps']} --allow_change max_steps"
    return command


def command_to_resume(run_dir: Path, *, world_size: int) -> str:
    """Return the command line that continues a run on this machine."""
    words = [paths.program("python")]
    if world_size > 1:
        words = [paths.program("torchrun"), f"--nproc_per_node={world_size}"]
    words += [paths.display_path(Path(word)) for word in paths.trainer(program_of(run_dir))]
    words += ["--run_name", run_dir.name]
    words += ["--resume", "latest"]
    if run_dir.parent != paths.runs_folder(None):
        words += ["--checkpoint_dir", paths.display_path(run_dir.parent)]
    return fmt.command_line(words)


def program_of(run_dir: Path) -> Literal["train", "finetune"]:
    """Return the program that began a run: finetune if it has instructions."""
    settings = history.read_json(run_dir / "config.json") or {}  # not written yet
    return "train" if settings.get("instructions") is None else "finetune"

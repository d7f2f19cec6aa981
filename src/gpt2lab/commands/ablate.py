"""Compare settings of the trainer at equal tokens and seeds, and write a table with errors.

python scripts/ablate.py settings.txt --out checkpoints/ablation --seeds 1 2 3 --max_tokens 1M --data_dir data/my_texts
python scripts/ablate.py settings.txt --out checkpoints/ablation --target 3.5 --max_tokens 1M
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional

from gpt2lab.config.command_line import option, run_tyro


@dataclass(frozen=True)
class Ablate:
    """Compare settings of the trainer; flags of the trainer are passed on to every run."""

    settings: Positional[Path] = field(
        metadata={
            "help": "file of one `name: flags of the trainer` a line; the first is the baseline"
        }
    )
    out: Path = field(
        metadata={
            "help": "folder of the runs and the table; a run that is complete is not run again"
        }
    )
    seeds: tuple[int, ...] = option((1337,), "each setting is run with each of them")
    target: float | None = option(
        None, "validation loss to reach; default, seed by seed, the last one of the first setting"
    )
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Run what is missing, then write and print the table."""
    shared: list[str] = []
    flags = run_tyro(Ablate, argv, passed_on=shared)
    from gpt2lab import paths
    from gpt2lab.commands import ablation
    from gpt2lab.commands.ablation_table import write_table

    out = paths.from_working_directory(flags.out)
    settings = ablation.read_settings(paths.from_working_directory(flags.settings))
    runs = ablation.plan_runs(settings, shared, seeds=flags.seeds, out=out)
    ablation.carry_out(runs, say=lambda line: print(line, file=sys.stderr, flush=True))
    table = write_table(runs, out, target=flags.target)
    print(json.dumps(table.as_json) if flags.json else table.markdown)
    return 0

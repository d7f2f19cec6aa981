"""Tell how long a run still takes, from what it has done so far.

python scripts/estimate_time.py
python scripts/estimate_time.py --run_name gpt2_20261120-210000
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import _bootstrap  # noqa: F401
from gpt2lab.config import ModelName
from gpt2lab.door import run
from gpt2lab.flags import option, run_tyro


@dataclass(frozen=True)
class EstimateTime:
    """Tell how long a run still takes, from what it has done so far."""

    run_name: str | None = option(None, "the run; default the one that wrote last")
    checkpoint_dir: Path | None = option(None, "folder of the runs; default checkpoints/")
    model: ModelName = option("gpt2", "model to describe where there is no run")
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Print the estimate for one run, or what is exact about a model where there is none."""
    flags = run_tyro(EstimateTime, argv)
    from gpt2lab import estimate, history, paths
    from gpt2lab.presets import preset

    folder = paths.from_repository(Path("checkpoints"))
    if flags.checkpoint_dir:
        folder = paths.from_working_directory(flags.checkpoint_dir)
    run_dir = folder / flags.run_name if flags.run_name else estimate.last_written_run(folder)
    remaining = estimate.estimate_remaining(run_dir) if run_dir else None
    config = history.read_config(run_dir) if run_dir else preset(flags.model)
    if flags.json:
        print(json.dumps(estimate.as_json(config, remaining)))
    else:
        print(estimate.describe(remaining) if remaining else estimate.describe_model(config))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))

"""Plant changes in copies of src/ and let `ablate --code` name them: an improvement, a harm, no change, less speed.

PYTHONPATH=src python -m benchmarks.planted_changes OUT --data_dir DATA --seeds 1 2 3

Each seed is the first of a whole procedure of its own. The flags of the trainer are FLAGS.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2lab import paths
from gpt2lab.commands import entry
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option, required
from gpt2lab.errors import CheckError

GPT = "src/gpt2lab/model/gpt.py"
_SPLIT = "        q, k, v = self.c_attn(x).split(C, dim=2)"
_ROTATE = "        if rotation is not None:\n            q, k ="
_ROPE = f"""        if rotation is None:
            channels = torch.arange(0, C // self.n_head, 2, device=x.device)
            angles = torch.arange(T, device=x.device)[:, None] * 10_000.0 ** -(channels * self.n_head / C)
            rotation = angles.cos(), angles.sin()
{_ROTATE}"""
_LAST = "        return F.dropout(self.c_proj(x), self.dropout, self.training)"
# {branch: (text of gpt.py, what replaces it, the verdict, the word on speed)}
PLANTED = {
    "rope": (_ROTATE, _ROPE, "better", None),
    "harm": (_LAST, _LAST.replace("return ", "return 0 * "), "worse", None),
    "refactoring": (
        _SPLIT,
        "        joined = self.c_attn(x)\n"
        "        q, k, v = joined[..., :C], joined[..., C : 2 * C], joined[..., 2 * C :]",
        *("equal bits", None),
    ),
    "slow": (
        _SPLIT,
        f"        for _ in range(100):\n            self.c_attn(x.detach())\n{_SPLIT}",
        *("equal bits", "slower"),
    ),
}
FLAGS = [
    *("--model=gpt2-nano", "--context_length=64", "--total_batch_size=1024", "--max_steps=300"),
    *("--until_decided", "--max_seeds=8", "--device=cpu", "--compile=off", "--val_tokens=32768"),
    *("--eval_freq=0", "--checkpoint_freq=0", "--sample_freq=0"),
]


@dataclass(frozen=True)
class Flags:
    """Let `ablate --code` name planted changes."""

    data_dir: Path = required("shards to train on")
    out: Path = argument("new folder of the repository and of the ablations")
    seeds: tuple[int, ...] = option((1, 2, 3), "of each, a whole procedure begins with it")


def git(repository: Path, *words: str) -> str:
    """Call git as nobody in particular and return what it prints."""
    who = {f"GIT_{one}_{x}": "x" for one in ("AUTHOR", "COMMITTER") for x in ("NAME", "EMAIL")}
    own = {n: value for n, value in os.environ.items() if not n.startswith("GIT_")} | who
    call = ["git", "-C", str(repository), *words]
    return subprocess.run(call, env=own, check=True, capture_output=True, text=True).stdout.strip()


def plant(repository: Path) -> Path:
    """Make a git repository of this src/ as it is, with a branch for each planted change; return its folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(paths.REPOSITORY / "src", repository / "src", ignore=ignored)
    git(repository, "init", "-q", "-b", "main")
    git(repository, "add", "--all")
    git(repository, "commit", "-qm", "main")
    for branch, (old, new, *_) in PLANTED.items():
        git(repository, "checkout", "-qb", branch, "main")
        text = (repository / GPT).read_text()
        if text.count(old) != 1:
            raise CheckError(
                f"{GPT} has {old!r} {text.count(old)} times, and {branch} needs it once"
            )
        (repository / GPT).write_text(text.replace(old, new))
        git(repository, "commit", "-qam", branch)
    git(repository, "checkout", "-q", "main")
    return repository


def main(argv: list[str]) -> int:
    """Run the procedure once a seed; print what was said.

    Raises: CheckError if a change was named wrong.
    """
    flags = parse_flags(Flags, argv)
    repository, wrong = plant(flags.out.absolute() / "repository"), []
    for seed in flags.seeds:
        command = [sys.executable, "-m", "gpt2lab", "ablate", "--code", "main", *PLANTED, *FLAGS]
        own = [f"--seeds={seed}", f"--out={flags.out.absolute() / f'from_{seed}'}", "--json"]
        command += [*own, f"--data_dir={flags.data_dir.absolute()}"]
        done = subprocess.run(command, cwd=repository, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise CheckError(f"ablate ended with exit code {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout)
        said = [s for one in found["code"].values() for s in one.get("sentences", [])]
        said += [one["sentence"] for one in found["comparisons"]]
        print(f"seed {seed}:", *said, f"spent {found['spent']}", sep="\n- ", flush=True)
        for branch, (*_, verdict, speed) in PLANTED.items():
            own_facts = found["code"][f"code-{branch}"]
            if own_facts["verdict"] != verdict or (speed and own_facts["speed"] != speed):
                wrong.append(f"{branch} from seed {seed}: {own_facts['verdict']}")
    if wrong:
        raise CheckError(f"named wrong: {'; '.join(wrong)}")
    print(f"each of {len(PLANTED)} changes was named right from {len(flags.seeds)} seeds")
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main))

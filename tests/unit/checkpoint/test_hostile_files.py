"""Files of a run made to hurt, with hashes that hold: one line that says what is wrong, or a run that goes on.

`FUZZ=2000 pytest THIS_FILE -k any_edit` tries more.
"""

import copy
import gc
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from edited_manifests import places
from gpt2lab.checkpoint import manifest
from gpt2lab.commands.checkpoints import List
from gpt2lab.errors import CheckpointError, ConfigError, GPT2LabError, to_gpt2lab_error
from gpt2lab.model.counts import read_shapes
from gpt2lab.runs import overview
from gpt2lab.runs.target import find_target
from tiny import VOCAB, edit_json, resolved
from whole_run import Run, reseal

pytestmark = pytest.mark.timeout(300)  # what waits for a pipe waits for ever
STEP = "step_00000004"
RAW = "@raw@"  # what follows stands in the file as it is


@pytest.fixture(scope="module")
def two(tiny_run) -> Run:
    """Return a run with checkpoints of steps 2 and 4 of 5; copy before use."""
    return tiny_run(max_steps=5, checkpoint_freq=2, eval_freq=2, stop_after_steps=4)


@pytest.fixture(autouse=True)
def no_finalizer_runs_within_nested_lists() -> Iterator[None]:
    """Reading them ends at Python's recursion limit: what is collected just then ends there too, and pytest sees it."""
    gc.disable()
    yield
    gc.enable()


def copied(two: Run, folder: Path) -> Run:
    gc.collect()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(two.path, folder / "tiny")
    data = next(flag for flag in two.flags if flag.startswith("--data_dir="))
    return Run(Path(data.partition("=")[2]), folder)


@pytest.fixture
def run(two, tmp_path) -> Run:
    return copied(two, tmp_path / "runs")


def edit(run: Run, file: str, place: tuple[Any, ...], value: Any) -> None:
    """Replace (or remove, if it is `...`) one value of a file, and make the hashes hold again."""
    folder = run.path / STEP if file in ("manifest.json", "state.json") else run.path
    content = json.loads((folder / file).read_text())
    inside = content
    for key in place[:-1]:
        inside = inside[key]
    if value is ...:
        del inside[place[-1]]
    else:
        inside[place[-1]] = copy.deepcopy(value)
    if "manifest_sha256" in content:
        content["manifest_sha256"] = manifest._hash_of(content)
    text = re.sub(f'"{RAW}([^"]*)"', r"\1", json.dumps(content))
    (folder / file).write_text(text)
    if file == "state.json":
        known = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        reseal(folder, lambda listed: listed["files"].update({file: known}))


def look_at(run: Run) -> None:
    """List the run and its state, as commands do that must show other runs too."""
    List(checkpoint_dir=run.path.parent).execute()
    overview.status_table(overview.read_runs(run.path.parent))


DEEP = RAW + "[" * 100_000
MANIFEST: dict[tuple[Any, ...], tuple[Any, ...]] = {
    **{("config", "n_layer"): (10_000_000, 9_999, "2"), ("config", "n_embd"): (10**6,)},
    **{("config", "lora_r"): (10**15,), ("config", "context_length"): (10**30,)},
    **{("config", "hellaswag_path"): ("\0",), ("config", "max_lr"): (RAW + "1e400",)},
    **{("config",): (DEEP, []), ("val_loss",): (RAW + "NaN",), ("step",): (..., -4)},
    **{("samples",): (-1, 2**53, 10**15), ("environment", "world_size"): (0, 2)},
    **{("environment",): (...,), ("order_version",): (7,)},
}
STATE: dict[tuple[Any, ...], tuple[Any, ...]] = {
    **{("state", "samples"): (10**15, ...), ("state", "best_val_loss"): (RAW + "NaN",)},
    **{("state", "recent_losses"): ([RAW + "Infinity"], ["5.5"]), ("state", "other"): (1,)},
    **{("state",): (DEEP,), ("rng",): ([],), ("rng", 0): ({},)},
    **{("rng", 0, "numpy", 2): (10**9,), ("rng", 0, "python"): (None,)},
}
CASES = [
    pytest.param(file, place, value, id=f"{file} {'/'.join(map(str, place))} {number}")
    for file, edits in (("manifest.json", MANIFEST), ("state.json", STATE))
    for place, values in edits.items()
    for number, value in enumerate(values)
]


@pytest.mark.parametrize(("file", "place", "value"), CASES)
def test_a_resume_says_in_one_line_what_is_wrong(run, file, place, value, wording):
    edit(run, file, place, value)
    look_at(run)
    before = run.listing()
    wording(run.rejected("--resume=4"))
    assert {name for name in run.listing() if not name.endswith("run.lock")} <= set(before)


JUNK = [
    *(..., None, True, -1, 0, 1, 7.5, 1e308, 10**7, 10**15, 2**53, 10**30, float("nan")),
    *("", "x", "..", "../x", "/etc/passwd", "a\0b", "a\nb", "\ud800", "\x1b[2J", "x" * 5000),
    *([], [1], ["x"], {}, {"name": "x"}, [[[]]], RAW + "1e400", DEEP),
]


@pytest.mark.parametrize(
    "file", ["manifest.json", "state.json", "config.json", "status.json", "run.json"]
)
def test_any_edit_is_one_line_or_a_run_that_goes_on(two, tmp_path_factory, file):
    folder = two.path / STEP if file in ("manifest.json", "state.json") else two.path
    of_file = list(places(json.loads((folder / file).read_text()), most=3))
    work = tmp_path_factory.mktemp("fuzz")

    @settings(max_examples=int(os.environ.get("FUZZ", "12")), deadline=None, database=None)
    @given(place=st.sampled_from(of_file), value=st.sampled_from(JUNK))
    def check(place: tuple[Any, ...], value: Any) -> None:
        run = copied(two, work)
        edit(run, file, place, value)
        look_at(run)
        try:
            run.train("--resume=4")
        except GPT2LabError as error:
            assert "\n" not in str(error)
        else:
            assert run.status()["state"] == "completed"

    check()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def link(path: Path) -> None:
    """Point to a file, or a folder, beside the runs."""
    victim = path.parents[len(path.parts) - path.parts.index("runs") - 1] / "victim"
    path.rename(victim)
    path.symlink_to(victim)


def holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("spoil", [pipe, device])
@pytest.mark.parametrize(
    "name", [f"{STEP}/{name}" for name in ("manifest.json", "state.json", "model.safetensors")]
)
def test_a_checkpoint_with_a_pipe_or_a_device_is_damaged(run, name, spoil):
    spoil(run.path / name)
    look_at(run)
    with pytest.raises(CheckpointError):
        run.train("--resume=4")
    run.train("--resume=latest")  # goes back to step 2
    assert (run.events("resume")[-1]["step"], run.status()["state"]) == (2, "completed")


APPENDED = ("run.lock", "metrics.jsonl", "log.txt")
REPLACED = ("config.json", "status.json", "run.json", "labels/best")


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        *itertools.product(APPENDED + REPLACED, (pipe, link)),
        *(("metrics.jsonl", holes), ("labels", link), ("evaluations", link)),
    ],
)
def test_a_start_writes_into_its_own_files_alone(run, name, spoil):
    """Nothing waits for a pipe, follows a link or reads a terabyte; row 30 tries all kinds on all commands."""
    (run.path / "evaluations").mkdir()
    spoil(run.path / name)
    victim = run.path.parents[1] / "victim"
    outside = [path for path in (victim, *victim.rglob("*")) if path.is_file()]
    before = [path.read_bytes() for path in outside]
    look_at(run)
    if name in REPLACED:
        run.train("--resume=latest")
        assert stat.S_ISREG((run.path / name).lstat().st_mode)
    else:
        (found,) = overview.read_runs(run.path.parent)
        assert f"{run.path / name}: " in str(found.problem)
        with pytest.raises((ConfigError, OSError)) as caught:
            run.train("--resume=latest")
        assert f"{run.path / name}: " in str(to_gpt2lab_error(caught.value))
    assert [path.read_bytes() for path in outside] == before


@pytest.mark.parametrize("target", ["../../elsewhere", "/", "x", "..", "step_1/../..", "a\nb"])
def test_a_label_names_a_checkpoint_of_its_run_and_nothing_else(run, target):
    (run.path.parent / "elsewhere").mkdir()
    (run.path / "labels" / "best").write_text(target)
    look_at(run)
    said = str(run.rejected("--resume=best", kind=CheckpointError))
    assert ("is not the name of a checkpoint" in said, "\n" in said) == (True, False)


@pytest.fixture
def hf(tmp_path) -> Path:
    """Return a Hugging Face folder whose header is small."""
    import numpy as np

    folder = tmp_path / "hf"
    folder.mkdir()
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    shapes = {"wte.weight": (VOCAB, 8), "wpe.weight": (16, 8), "h.0.ln_1.bias": 8}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("n_layer", 10**7), ("n_layer", "1"), ("n_embd", 10**6), ("n_positions", 10**12)),
        *(("vocab_size", 10**12), ("n_head", 0), ("n_head", 3)),
    ],
)
def test_sizes_are_compared_with_the_weights_before_a_model_is_built(hf, key, value, wording):
    edit_json(hf / "config.json", **{key: value})
    with pytest.raises(CheckpointError, check=wording):
        find_target(str(hf), hf.parent).model_config()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_init_from_waits_for_no_pipe(hf, tiny_flags, name):
    pipe(hf / name)
    with pytest.raises(CheckpointError, match=r"^.*(not a file|neither a run).*$"):
        resolved([*tiny_flags, f"--init_from={hf}"])


def test_the_weights_end_where_their_header_says(tmp_path):
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    for size in (3, 4, 5):
        (path := tmp_path / "w").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
        with pytest.raises(CheckpointError) if size != 4 else nullcontext():
            assert read_shapes(path) == {"w": (1,)}


HEADERS = st.binary(max_size=60) | st.recursive(
    st.none() | st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from(["F32", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["w", "shape", "data_offsets", "dtype"]), inner)
    ),
    max_leaves=10,
).map(lambda value: json.dumps(value).encode())


@settings(max_examples=200, deadline=None)
@given(header=HEADERS, length=st.none() | st.integers(0, 2**64 - 1))
def test_any_header_is_read_or_rejected(tmp_path_factory, header, length):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    with pytest.raises(CheckpointError) as caught:
        read_shapes(path)
    assert "\n" not in str(caught.value)

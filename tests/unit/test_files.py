"""Files that appear complete or not at all, and the temporaries beside them."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpt2lab import files
from gpt2lab.files import create_durably, parse_json, read_regular, replace_durably, staged_folder

SOURCE = Path(files.__file__).parents[1]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_file_replaces_none(tmp_path, monkeypatch, has_links):
    if not has_links:
        not_here = OSError(errno.EPERM, os.strerror(errno.EPERM))
        monkeypatch.setattr(os, "link", Mock(side_effect=not_here))
    create_durably(tmp_path / "new", b"content")
    with pytest.raises(FileExistsError) as error:
        create_durably(tmp_path / "new", b"other")
    assert error.value.filename == str(tmp_path / "new")
    assert (read_regular(tmp_path / "new", at_most=7), names(tmp_path)) == (b"content", {"new"})


def test_fifty_lists_may_lie_in_each_other():
    assert parse_json("[" * 50 + "]" * 50)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may make a device")
def test_a_device_is_never_replaced(tmp_path):
    """As `report --out /dev/null` by root did."""
    null = tmp_path / "null"
    os.mknod(null, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    with pytest.raises(OSError, match="null"):
        replace_durably(null, "content")
    assert stat.S_ISCHR(null.stat().st_mode)
    assert names(tmp_path) == {"null"}


def test_a_folder_appears_with_the_end_of_its_block_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError, match="half-way"), staged_folder(tmp_path / "new") as folder:
        (folder / "part").write_text("content")
        raise RuntimeError("half-way")
    assert names(tmp_path) == set()
    with staged_folder(tmp_path / "new") as folder:
        (folder / "part").write_text("content")
    assert ((tmp_path / "new" / "part").read_text(), names(tmp_path)) == ("content", {"new"})


def test_what_a_killed_process_left_goes_and_what_a_live_one_holds_stays(tmp_path):
    """So do a pipe, a link and other names, which are none of ours."""
    dead, live, pipe, link = (tmp_path / f".new.0000000{number}" for number in range(4))
    dead.mkdir()
    (dead / "part").write_text("content")
    live.write_text("content")
    os.mkfifo(pipe)
    link.symlink_to(tmp_path)
    (tmp_path / ".newer.00000000").write_text("another file's")
    (tmp_path / ".new.txt").write_text("a user's")
    with open(live) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        replace_durably(tmp_path / "new", "content")
    stays = {"new", live.name, pipe.name, link.name, ".newer.00000000", ".new.txt"}
    assert names(tmp_path) == stays
    replace_durably(tmp_path / "new", "content")
    assert names(tmp_path) == stays - {live.name}


def test_a_temporary_that_cannot_be_opened_does_not_stay(tmp_path, monkeypatch):
    fail = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(files, "_open_locked", fail)
    with pytest.raises(OSError, match="Input/output error"):
        replace_durably(tmp_path / "new", "content")
    assert names(tmp_path) == set()


def test_two_writers_of_one_file_do_not_sweep_each_other_away(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"
        "from pathlib import Path\nfrom gpt2lab.files import replace_durably\n"
        f"for number in range(150):\n    replace_durably(Path({str(tmp_path / 'new')!r}), 'content')\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert ((tmp_path / "new").read_text(), names(tmp_path)) == ("content", {"new"})

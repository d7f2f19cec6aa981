"""Whether the disk has room for the checkpoints that a run will keep. No torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from gpt2lab import fmt
from gpt2lab.checkpoint import catalog


@dataclass(frozen=True)
class Room:
    """The disk of a run before it starts, in bytes."""

    folder: Path  # the nearest that exists: it is on the disk that the run will be on
    free: int
    held: int  # by checkpoints that the run has already, which later ones replace
    needed: int  # by all that the retention plan keeps at once

    @property
    def fits(self) -> bool:
        """Tell whether the retention plan fits."""
        return self.free + self.held >= self.needed

    def shortage(self) -> tuple[str, ...]:
        """Return a warning if the retention plan does not fit, else nothing."""
        if self.fits:
            return ()
        return (
            f"disk of {self.folder}: {self.describe()}; "
            f"lower --keep_checkpoints, free space or choose another --checkpoint_dir",
        )

    def describe(self) -> str:
        """Say what is needed and what there is."""
        held = f" and {fmt.num_bytes(self.held)} in its checkpoints" if self.held else ""
        return (
            f"the checkpoints to be kept need {fmt.num_bytes(self.needed)}, "
            f"{fmt.num_bytes(self.free)} free{held}"
        )


def look_for_room(run_dir: Path, needed: int) -> Room:
    """Compare the bytes that a run keeps at once with what its disk has."""
    folder = run_dir.absolute()
    while not folder.is_dir():
        folder = folder.parent
    infos, _ = catalog.list_checkpoints(run_dir)
    return Room(
        folder=folder,
        free=shutil.disk_usage(folder).free,
        held=sum(info.num_bytes for info in infos),
        needed=needed,
    )

"""Print the memory of this process after each of three epochs over a folder of shards."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from gpt2lab.data.shards import open_data  # noqa: E402
from loading import loader_over  # noqa: E402

loader = loader_over(open_data(Path(sys.argv[1]), vocab_size=50304).splits["train"], samples=64)
batches, after = loader.batches(0), []
per_epoch = loader.order.windows_per_epoch // 64 + 1
for _ in range(3):
    for _ in range(per_epoch):
        next(batches)
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    after.append(resident * os.sysconf("SC_PAGE_SIZE"))
batches.close()
print(*after)

"""Read a file of a hub of our own, whose file server fails for the first N requests: prints its texts or the error.

python hub_outage.py FAILURES
"""

import http.server
import json
import os
import sys
import threading
import time

REVISION = "0123456789012345678901234567890123456789"
CONTENT = b"".join(json.dumps({"text": f"text {i}"}).encode() + b"\n" for i in range(3))
FILES = [{"type": "file", "path": "a.jsonl", "size": len(CONTENT), "oid": "0" * 40}]
failures = int(sys.argv[1])
requests = 0


class Hub(http.server.BaseHTTPRequestHandler):
    """The three answers that reading a file of a data set asks for."""

    def do_GET(self) -> None:
        global requests
        if "/tree/" in self.path:
            return self._answer(200, FILES)
        if self.path.startswith("/api/datasets/"):
            return self._answer(200, {"id": "org/set", "sha": REVISION, "siblings": []})
        if "/resolve/" not in self.path:
            return self._answer(404, {})
        requests += 1
        if requests <= failures:
            return self._answer(503, {})
        begin, end = self.headers["Range"].removeprefix("bytes=").split("-")
        return self._send(206, CONTENT[int(begin) : int(end) + 1])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, FILES)

    def _answer(self, status: int, content: object) -> None:
        self._send(status, json.dumps(content).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
time.sleep = lambda seconds: None  # between attempts

from gpt2lab.data.prepare.groups import File, Share  # noqa: E402 - the hub's address comes first
from gpt2lab.data.prepare.readers import Document, read  # noqa: E402
from gpt2lab.errors import DataError  # noqa: E402

file = File("a.jsonl", len(CONTENT), f"hf://datasets/org/set@{REVISION}/a.jsonl", "jsonl")
try:
    for document in read(Share(file), text_column="text"):
        print("".join(document.blocks) if isinstance(document, Document) else document)
except DataError as error:
    print(f"{type(error).__name__}: {error}")
print(requests)

"""What the adapters' tests share: a server that lists models, a program that tells how it was started, the command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from tests.support.waiting import PATIENCE
from tokencache.adapters.load import load_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHIPPED = load_all()
COMMAND = [sys.executable, "-c", "from tokencache.cli import main; main()"]

PROGRAM = """#!{python}
import json, os, pathlib, sys
told = pathlib.Path({told!r})
config = os.environ.get("CODEX_HOME")
files = {{str(p.relative_to(config)): p.read_text() for p in pathlib.Path(config).rglob("*") if p.is_file()}} if config else {{}}
stdin = sys.stdin.read()
told.write_text(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ), "files": files, "cwd": os.getcwd(), "stdin": stdin}}))
print("said")
print("complained", file=sys.stderr)
{then}
"""


@contextlib.contextmanager
def listing(
    *models: dict, status: int = 200, body: bytes | None = None, sessions: bool = True
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Serve `/v1/models`; yields the base URL, and the requests as they come: path and key. An engine has no `sessions`: 404 there."""
    asked: list[tuple[str, str]] = []
    answer = json.dumps({"object": "list", "data": models}).encode() if body is None else body

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("Authorization", "")))
            self.send_response(status if sessions or not self.path.startswith("/s/") else 404)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Machine:
    """A machine with programs of its own on the PATH, a home of somebody's, and a place for temporary files."""

    def __init__(self, root: Path) -> None:
        self.bin, self.home, self.work, self.told = root / "bin", root / "home", root / "work", root / "told.json"
        for directory in (self.bin, self.home, self.work):
            directory.mkdir()

    def install(self, name: str, then: str = "sys.exit(7)") -> None:
        """Put a program on the PATH that tells how it was started, speaks, and then does what is said."""
        program = self.bin / name
        program.write_text(PROGRAM.format(python=sys.executable, told=str(self.told), then=then))
        program.chmod(0o755)

    @property
    def env(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
        return {**kept, "PATH": str(self.bin), "HOME": str(self.home), "COLUMNS": "200"}

    def tokencache(self, *args: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        env = {**self.env, **more}
        return subprocess.run(
            [*COMMAND, *args], env=env, cwd=self.work, input=stdin, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    @property
    def started(self) -> dict:
        """How the program was started."""
        return json.loads(self.told.read_text())

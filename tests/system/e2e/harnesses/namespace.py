"""Runs a harness program where it can reach only one Unix socket.

A harness is third-party software that may contact remote servers. Here it runs in its own namespaces: a network with only a loopback
interface, its own processes, its own mounts, a home, work and temporary directory made for the run, and a fresh environment. The engine
and the proxy run outside. A socket with a path crosses network namespaces, so `inside.py` listens on a local port in there and carries
each connection over that socket, where `recording_relay.py` answers.

In the namespace the run's folder is at `RUN_DIR`, always the same path, so that prompts, which quote it, are the same in every run.

If namespaces are not permitted, the program runs without them, its proxy variables point to a closed port, and `Ended.isolated` is false:
`remark` states this in the report and in the table.
"""

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

LOCK = Path(tempfile.gettempdir(), "tokencache-lab.lock")
"""Runs with a mount share it. A run that needs the folder itself has it alone."""
RUN_DIR = Path("/tmp/tokencache-lab")  # noqa: S108 - the same on every machine is the point; it is covered by a mount
WORK, HOME, TMP = RUN_DIR / "work", RUN_DIR / "home", RUN_DIR / "tmp"
PORT = 8100
"""The port of the relay inside a network namespace: fixed, for the same reason."""

NAMESPACES = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
INSIDE = Path(__file__).with_name("inside.py")


@dataclass(frozen=True)
class Ended:
    """The results of one command, besides its files."""

    returncode: int
    stdout: str
    stderr: str
    isolated: bool

    @property
    def output(self):
        return f"exit status {self.returncode}\n{self.stdout[-4000:]}\n{self.stderr[-4000:]}"


def remark(runs):
    """A remark for the report if some of these runs were not isolated; otherwise empty."""
    return "" if all(ended.isolated for ended in runs) else "WITHOUT NAMESPACES: not permitted on this machine, the network was reachable"


@functools.cache
def namespaces():
    """The command prefix that creates namespaces: as root, or as a user who is root inside; empty if that is not permitted."""
    for words in (NAMESPACES, [*NAMESPACES, "--map-root-user"]):
        with contextlib.suppress(OSError):
            if subprocess.run([*words, "true"], stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0:
                return words
    return []


def port():
    """The port at which the next harness reaches the relay."""
    return PORT if namespaces() else free_port()


def prepare(folder):
    """Makes the run's folder with its home, work and temporary directory."""
    for name in (WORK.name, HOME.name, TMP.name):
        (folder / name).mkdir(parents=True, exist_ok=True)


async def run_isolated(command, folder, environment, way_out, at_port, *, seconds, interrupt=None):
    """Runs `command` in `RUN_DIR`/work with only this environment and waits for its end; `way_out` is the socket that `at_port` leads to.

    `interrupt` is `(words, times)`: send SIGINT once the program has received these words that many times.
    """
    words = namespaces()
    base = {"HOME": str(HOME), "TMPDIR": str(TMP), "LANG": "C.UTF-8", "TERM": "dumb", "USER": "agent", "TZ": "UTC"}
    if not words:
        base |= {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"}
    wanted = {
        "isolated": bool(words),
        "folder": str(folder),
        "run_dir": str(RUN_DIR),
        "socket": str(way_out),
        "port": at_port,
        "command": [str(word) for word in command],
        "cwd": str(WORK),
        "environment": base | environment,
        "seconds": seconds,
        "interrupt": interrupt,
    }
    with _run_dir(folder, covered=bool(words)), (folder / "stdout").open("w+b") as out, (folder / "stderr").open("w+b") as err:
        process = await asyncio.create_subprocess_exec(
            *words,
            sys.executable,
            str(INSIDE),
            json.dumps(wanted),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            returncode = await asyncio.wait_for(process.wait(), seconds + 30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        remarks = []
        for file in (out, err):
            file.seek(0)
            remarks.append(file.read().decode(errors="replace"))
    return Ended(returncode, *remarks, isolated=bool(words))


@contextlib.contextmanager
def _run_dir(folder, *, covered):
    """Provides `RUN_DIR`: as a mount point, or, without namespaces, temporarily as the run's folder itself.

    Runs of other processes may have mounts there. To remove it would detach these, so it stays if one of them holds the lock.
    """
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if covered else fcntl.LOCK_EX)
        if covered:
            RUN_DIR.mkdir(exist_ok=True)
            yield
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                RUN_DIR.rmdir()
            return
        with _moved(folder):
            yield


@contextlib.contextmanager
def _moved(folder):
    with contextlib.suppress(OSError):
        RUN_DIR.rmdir()  # an empty one, which a covered run left
    RUN_DIR.mkdir()
    try:
        for name in (WORK.name, HOME.name, TMP.name):
            shutil.move(folder / name, RUN_DIR / name)
        yield
    finally:
        for name in (WORK.name, HOME.name, TMP.name):
            if (RUN_DIR / name).exists():
                shutil.move(RUN_DIR / name, folder / name)
        shutil.rmtree(RUN_DIR)

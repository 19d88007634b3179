"""Shows which package uses a call's CPU: py-spy samples a target on one busy core and each sample is assigned to a package.

A sample is the Python stack at one moment; it counts once, for the innermost frame that has a package. C code (the HTTP parser, JSON, the
kernel's part of a write) counts for the Python frame that called it. A table of path prefixes assigns files to packages; the longest
matching prefix applies. A file that serves several packages has none, and counts for its caller.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.drive import drive
from bench.loads import Row
from bench.processes import Process
from bench.targets import OTHERS, Target

LOOP, SERVER, CLIENT = "kernel, event loop", "aiohttp server", "aiohttp client, both calls"
READING, PLANNING, TAIL = "reading the request", "matching, planning", "the tail"
SENDING, REPLY, RECORDING, REST = "writing to the engine", "the reply", "recording", "the rest"
NAMES = (LOOP, SERVER, CLIENT, READING, PLANNING, TAIL, SENDING, REPLY, RECORDING, REST)

CALLER = ""
"""No package: this code counts for its caller."""

PACKAGES: Mapping[str, str] = {
    "asyncio/": LOOP,
    "uvloop/": LOOP,
    "aiohttp/web": SERVER,
    "aiohttp/client": CLIENT,
    "aiohttp/connector": CLIENT,
    "tokencache/": REST,
    "tokencache/dialects/": READING,
    "tokencache/core/": PLANNING,
    "tokencache/core/ids.py": CALLER,
    "tokencache/core/context.py": RECORDING,
    "tokencache/core/turn.py": RECORDING,
    "tokencache/proxy/plan.py": PLANNING,
    "tokencache/proxy/planner.py": PLANNING,
    "tokencache/proxy/resplice.py": PLANNING,
    "tokencache/dialects/chat/rendering.py": TAIL,
    "tokencache/engine/template/": TAIL,
    "tokencache/engine/": SENDING,
    "tokencache/proxy/prefix_cache.py": SENDING,
    "tokencache/engine/reply.py": REPLY,
    "tokencache/engine/prompt_echo.py": REPLY,
    "tokencache/engine/chunks.py": REPLY,
    "tokencache/dialects/chat/reply.py": REPLY,
    "tokencache/dialects/completion_reader.py": REPLY,
    "tokencache/proxy/reply_source.py": REPLY,
    "tokencache/proxy/delivery.py": REPLY,
    "tokencache/proxy/response.py": REPLY,
    "tokencache/proxy/recorder.py": RECORDING,
    "tokencache/proxy/ledger.py": RECORDING,
    "tokencache/store/": RECORDING,
    "bench/": REST,
}
_PREFIXES = sorted(PACKAGES, key=len, reverse=True)

SHAPES = ("1 KB", "141 KB")
AT_ONCE = 64
RATE = 500
"""Samples a second."""


def binary() -> str | None:
    """Where py-spy is: next to this Python, where `make bench-others` installs it, or on `PATH`."""
    for place in (Path(sys.executable).parent / "py-spy", OTHERS / "py-spy" / "bin" / "py-spy"):
        if os.access(place, os.X_OK):
            return str(place)
    return shutil.which("py-spy")


def package_of(files: Sequence[str]) -> str:
    """The package of a sample: `files` of its frames, outermost first."""
    for file in reversed(files):
        found = next((PACKAGES[prefix] for prefix in _PREFIXES if file.startswith(prefix)), CALLER)
        if found:
            return found
    return REST


def shares(stacks: Iterable[str]) -> dict[str, float]:
    """Converts py-spy's raw lines (`frame (file:line);frame (file:line) count`) to the share of each package.

    Raises:
        RuntimeError: There are no samples.
    """
    counted: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rstrip().rpartition(" ")
        files = [frame.rpartition(" (")[2].rstrip(")").rpartition(":")[0] for frame in stack.split(";")]
        counted[package_of(files)] += int(count)
    total = counted.total()
    if not total:
        raise RuntimeError("py-spy saw nothing")
    return {name: counted[name] / total for name in NAMES}


def sampled(process: Process, work: Callable[[], object]) -> dict[str, float]:
    """The share of each package in a process's work while it is under load.

    Raises:
        RuntimeError: py-spy may not inspect the process.
    """
    with tempfile.TemporaryDirectory(prefix="bench-profile-") as folder:
        raw, log = Path(folder, "stacks"), Path(folder, "log")
        command = [str(binary()), "record", "--rate", str(RATE), "--duration", "600", "--format", "raw", "--output", str(raw)]
        with log.open("wb") as output, subprocess.Popen([*command, "--pid", str(process.pid)], stdout=output, stderr=output) as spy:
            try:
                work()
            finally:
                spy.send_signal(signal.SIGINT)  # on SIGINT it writes its samples
                spy.wait(60)
        if not raw.exists():
            raise RuntimeError(f"py-spy: {(log.read_text().strip().splitlines() or ['no output'])[-1]}")
        return shares(raw.read_text().splitlines())


def run_profile(engine: Process, targets: Sequence[Target], seconds: float) -> list[dict[str, Any]]:
    """For each shape and target the CPU of a call, and each package's share.

    Raises:
        FileNotFoundError: py-spy is missing.
        RuntimeError: py-spy may not inspect a target.
    """
    if binary() is None:
        raise FileNotFoundError("py-spy is not installed: make bench-others")
    found = []
    for shape in SHAPES:
        spec = Row(shape, AT_ONCE, seconds, 1).spec(slow=False)
        for target in targets:
            cpu = drive(engine, target, spec)["cpu_us"]  # not while it is sampled: sampling slows it down
            used = sampled(target.processes[0], lambda: drive(engine, target, spec))  # noqa: B023 - called at once
            spent = {name: round(cpu * share, 1) for name, share in used.items()}
            found.append({"shape": shape, "target": target.name, "cpu_us": cpu, "rooms_us": spent})
    return found

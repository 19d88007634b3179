"""`python -m tests.system.adversary --turns 100000 --seed 1`: run the adversary, and print its counts and findings."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time

from tests.support.redis_server import RealRedis
from tests.system.adversary.run import replay, run


def main() -> int:
    """Run, print, and return 1 if there is a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.adversary", description=__doc__)
    parser.add_argument("--turns", type=int, default=10_000, help="how many calls, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--template", action="append", default=[], help="of tests/engine/template/more_kinds.py; all if none is named")
    parser.add_argument("--history", choices=["supply", "follow"], default="supply", help="as of the proxy's option")
    parser.add_argument("--redis", action="store_true", help="store the turns in a Redis of its own, not in memory")
    parser.add_argument("--session", type=int, help="replay this session alone")
    parser.add_argument("--show", type=int, default=5, help="how many findings of each class are shown")
    parser.add_argument("--misses", action="store_true", help="show replies that were owed and missed, too")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began = time.perf_counter()
    with RealRedis() if asked.redis else contextlib.nullcontext() as server:
        redis = server.url if server is not None else ""
        if asked.session is not None:
            tally = replay(asked.seed, asked.session, asked.template, asked.history, redis=redis)
        else:
            tally = run(asked.turns, asked.seed, processes=asked.processes, templates=asked.template, history=asked.history, redis=redis)
    seconds = time.perf_counter() - began
    for line in tally.trace:
        print(line)
    print(tally.table())
    print(f"{seconds:.0f} s, {tally.counts['turns'] / seconds:.0f} turns/s")
    for line in tally.shown(asked.show, misses=asked.misses or asked.session is not None):
        print(line)
    return int(tally.guilty)


if __name__ == "__main__":
    sys.exit(main())

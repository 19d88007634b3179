"""Replays rollouts in virtual time on several engines: what the placement of sessions is worth.

    python -m bench.placement [--seeds 5] [--loads NAME,NAME] [--write]     # --write: docs/several-engines.md
    python -m bench.placement --trace FILE [--loads NAME,NAME]              # recorded rollouts, on the engines of these loads

`hash` and `sticky` place sessions; `admission` is `sticky`, and new sessions begin only while they fit. The policies are those of
`tokencache.engine`, as the proxy uses them. An engine schedules as vLLM 0.32 does: blocks of 64 tokens, cached when they are scheduled, the
least recently used one is evicted first; running requests first, of which the newest is preempted if blocks are short; then waiting ones
in order, each when its whole prompt fits, in chunks of 8,192 tokens. `Load.prefill`, `STEP` and the others are the seconds of one engine:
the ratio of two policies counts, no time does.

The calls of a trace (`tokencache export --format agentic-mooncake`) begin as recorded: after the replies that they contain, and the
recorded wait; a rollout begins at its recorded time. They share the blocks that their recorded prompts share.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from bench.tables import Table, write
from tokencache.engine.admission import Admission
from tokencache.engine.placement import IDLE_SECONDS, Placement
from tokencache.engine.pool import preference

BLOCK, CHUNK, MOST_RUNNING = 64, 8192, 256
STEP, PER_REQUEST, PER_CONTEXT_TOKEN = 6e-3, 5e-5, 2.8e-7
"""Seconds."""
EXPECTED = 12_000
"""Tokens that a session is expected to have until some have ended."""


class Load(NamedTuple):
    """Rollouts and the engines that serve them; times in seconds, sizes in tokens."""

    engines: int = 4
    kv: int = 160_000
    groups: int = 16
    siblings: int = 8
    pause: float = 0.8
    shared: int = 2_800
    longest: int = 30_000
    prefill: float = 2e-5
    in_flight: int = 10**9


ASYNC = Load(groups=40, in_flight=128)
LOADS = {
    "KV overloaded: 160k tokens an engine": Load(),
    "KV suffices: 400k": Load(kv=400_000),
    "KV short: 80k": Load(kv=80_000),
    "light: 24 sessions": Load(groups=3),
    "pauses of 5 s": Load(pause=5.0),
    "shared prompts of 10k": Load(shared=10_000),
    "prefill three times dearer": Load(prefill=6e-5),
    "asynchronous: 320 sessions, 128 at a time": ASYNC,
    "asynchronous, pauses of 5 s": ASYNC._replace(pause=5.0),
}


Block = tuple[int, int, int]
"""What no other block has: a group, a sibling (-1: of all siblings), and a place; or -1, -1 and an id of a trace."""


class Call(NamedTuple):
    """A call of a rollout: its tokens, and the calls that must have ended before it, with the wait after each; `start` if none."""

    prompt: int
    sampled: int
    after: dict[int, float]
    start: float = 0.0


class Rollout(NamedTuple):
    """One rollout, which begins after `start` seconds. `block` names a block of a call's prompt and reply: call, place."""

    name: str
    group: int
    calls: list[Call]
    block: Callable[[int, int], Block]
    start: float = 0.0


def rollouts(load: Load, seed: int) -> list[Rollout]:
    """Rollouts as of agents in RL: lengths and pauses are lognormal; a group's prompt and difficulty are common to it."""
    rng = random.Random(seed)

    def draw(median: float, sigma: float, low: float, high: float) -> float:
        return min(high, max(low, rng.lognormvariate(math.log(median), sigma)))

    made = []
    for group in range(load.groups):
        shared, difficulty = int(draw(load.shared, 0.4, 2000, 20_000)), draw(1, 0.3, 0.5, 2)
        for sibling in range(load.siblings):
            total, pause, calls = 0, 0.0, list[Call]()
            for n in range(int(draw(18 * difficulty, 0.4, 10, 40))):
                added, sampled = (int(draw(300, 1.0, 20, 4000)) if n else shared), int(draw(130, 0.8, 16, 2000))
                if total + added + sampled > load.longest:
                    break
                calls.append(Call(total + added, sampled, {n - 1: pause} if n else {}))
                total, pause = total + added + sampled, draw(load.pause, 1.2, 0.1, 60)

            def block(_call: int, place: int, ids: tuple[int, int, int] = (group, sibling, shared // BLOCK)) -> Block:
                return ids[0], -1 if place < ids[2] else ids[1], place

            made.append(Rollout(f"g{group}s{sibling}", group, calls, block))
    return made


def recorded(path: Path) -> list[Rollout]:
    """Rollouts of a trace, in the order in which they began."""
    with path.open() as lines:
        header, *rows = map(json.loads, lines)
    if (header.get("schema"), header.get("version"), header.get("block_size")) != ("dynamo.agentic_mooncake", 2, BLOCK):
        raise SystemExit(f"{path}: not written by tokencache export --format agentic-mooncake --block-size {BLOCK}")
    plays = defaultdict[str, list[dict[str, Any]]](list)
    for row in rows:
        plays[row["play_id"]].append(row)
    made = [_recorded(n, name, play) for n, (name, play) in enumerate(plays.items())]
    return sorted(made, key=lambda rollout: rollout.start)


def _recorded(group: int, name: str, rows: list[dict[str, Any]]) -> Rollout:
    numbers = {row["request_id"]: n for n, row in enumerate(rows)}
    start = min(row["not_before_ms"] for row in rows if not row["dependencies"]) / 1000
    calls, known = list[Call](), [row["hash_ids"][: row["input_length"] // BLOCK] for row in rows]
    for row in rows:
        after = {numbers[one["request_id"]]: one["delay_ms"] / 1000 for one in row["dependencies"]}
        calls.append(Call(row["input_length"], row["output_length"], after, 0.0 if after else row["not_before_ms"] / 1000 - start))
        for one in row["dependencies"]:
            if one["relation"] == "sequence":  # its prompt begins with the prompt and the reply of that call
                before = numbers[one["request_id"]]
                known[before] = row["hash_ids"][: (calls[before].prompt + calls[before].sampled) // BLOCK]

    def block(call: int, place: int) -> Block:
        return (-1, -1, known[call][place]) if place < len(known[call]) else (group, call, place)

    return Rollout(name, group, calls, block, start)


class Request:
    """A request at an engine. `blocks` are those that it holds; `None` for one that is not full yet."""

    def __init__(self, call: Call, block: Callable[[int], Block], done: Callable[[], None]) -> None:
        self.call, self.block, self.done = call, block, done
        self.computed = self.sampled = self.short = 0
        self.blocks: list[Block | None] = []

    @property
    def tokens(self) -> int:
        return self.call.prompt + self.sampled


class Engine:
    """An engine with a KV cache of `blank` blocks that nothing used yet; `free` ones can be evicted."""

    def __init__(self, later: Callable[[float, Callable[[], None]], None], load: Load) -> None:
        self._later, self._prefill = later, load.prefill
        self._blank = load.kv // BLOCK
        self._used: dict[Block, int] = {}
        self._free: OrderedDict[Block, None] = OrderedDict()
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._busy = False

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        if not self._busy:
            self._busy = True
            self._later(0, self._step)

    def _has(self, block: Block) -> bool:
        return block in self._used or block in self._free

    def _grow(self, request: Request, tokens: int) -> bool:
        """Hold blocks for so many tokens, and cache those that become full; false if there are not enough."""
        blocks = request.blocks
        while len(blocks) * BLOCK < tokens:
            if self._blank:
                self._blank -= 1
            elif self._free:
                self._free.popitem(last=False)
            else:
                return False
            blocks.append(None)
        for place in range(request.computed // BLOCK, tokens // BLOCK):
            block = request.block(place)
            if blocks[place] is None and not self._has(block):
                blocks[place] = block
                self._used[block] = 1
        return True

    def _release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            if block is None:
                self._blank += 1
            elif self._used[block] > 1:
                self._used[block] -= 1
            else:
                del self._used[block]
                self._free[block] = None
        request.blocks = []

    def _step(self) -> None:
        budget, plan, preempted = CHUNK, dict[Request, int](), False
        for request in list(self._running):
            if request not in self._running or not budget:
                continue
            tokens = min(budget, request.tokens - request.computed) or 1
            while request in self._running and not self._grow(request, request.computed + tokens):
                victim = self._running.pop()
                self._release(victim)
                victim.computed, preempted = 0, True
                self._waiting.appendleft(victim)
                plan.pop(victim, None)
            if request in self._running:
                plan[request] = tokens
                budget -= tokens
        while self._waiting and budget and not preempted and len(self._running) < MOST_RUNNING:
            request, usable = self._waiting[0], self._blank + len(self._free)
            if request.short > usable:
                break  # there were not enough blocks before, and there are no more now
            cached = list(itertools.takewhile(self._has, map(request.block, range((request.tokens - 1) // BLOCK))))
            request.short = math.ceil(request.tokens / BLOCK) - len(cached) + sum(block in self._free for block in cached)
            if request.short > usable:
                break
            self._waiting.popleft()
            for block in cached:
                self._free.pop(block, None)
                self._used[block] = self._used.get(block, 0) + 1
            request.blocks, request.computed = [*cached], len(cached) * BLOCK
            plan[request] = tokens = min(budget, request.tokens - request.computed)
            self._grow(request, request.computed + tokens)
            self._running.append(request)
            budget -= tokens
        if not plan:
            self._busy = False
            return
        prefill = sum(tokens for tokens in plan.values() if tokens > 1)
        context = sum(request.computed for request in plan)
        cost = STEP + self._prefill * prefill + PER_REQUEST * len(plan) + PER_CONTEXT_TOKEN * context
        self._later(cost, partial(self._finish, plan))

    def _finish(self, plan: dict[Request, int]) -> None:
        for request, tokens in plan.items():
            request.computed += tokens
            request.sampled += request.computed >= request.tokens
            if request.sampled >= request.call.sampled:
                self._running.remove(request)
                self._release(request)
                request.done()
        self._step()


class Run:
    """A rollout under way: the order of its calls, and when those that are over ended."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout, self._ended = rollout, dict[int, float]()
        self.order = TopologicalSorter({n: call.after for n, call in enumerate(rollout.calls)})
        self.order.prepare()

    def end(self, n: int, now: float) -> list[tuple[int, float]]:
        """Note that a call has ended. Returns the calls that waited for it as the last one, and when each begins."""
        self._ended[n] = now
        self.order.done(n)
        waits = {later: self.rollout.calls[later].after for later in self.order.get_ready()}
        return [(later, max(self._ended[one] + wait for one, wait in after.items())) for later, after in waits.items()]


class Replay:
    """Replays rollouts; `sticky` is whether sessions are placed by load, otherwise by the hash; `admits` is whether new ones wait."""

    def __init__(self, load: Load, made: Sequence[Rollout], *, sticky: bool, admits: bool = False) -> None:
        self._now, self._numbers = 0.0, itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting, self._in_flight = deque(made), load.in_flight
        self._engines = {f"http://engine-{n}:8000": Engine(self._later, load) for n in range(load.engines)}
        self._placement, self._sticky, self._capacity = Placement(), sticky, load.kv * load.engines
        self._admission = Admission(self._placement, EXPECTED) if admits else None
        self._created: deque[Rollout] = deque()
        self._bound: dict[str, str] = {}
        self._ends: dict[int, float] = {}

    def _later(self, seconds: float, run: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), run))

    def run(self) -> tuple[float, float]:
        """Return the makespan, and the mean time at which a group is complete."""
        for _ in range(min(self._in_flight, len(self._waiting))):
            self._begin()
        while self._events:
            self._now, _, run = heapq.heappop(self._events)
            run()
        return self._now, statistics.mean(self._ends.values())

    def _begin(self) -> None:
        if self._waiting:
            rollout = self._waiting.popleft()
            self._later(max(0.0, rollout.start - self._now), partial(self._admit, rollout))

    def _admit(self, *created: Rollout) -> None:
        """Begin the rollouts that were created and fit, oldest first."""
        self._created += created
        while self._created and self._has_room(self._created[0].name):
            run = Run(self._created.popleft())
            first, *others = run.order.get_ready()
            self._ask(run, first)
            for n in others:
                self._later(run.rollout.calls[n].start, partial(self._ask, run, n))

    def _has_room(self, session: str) -> bool:
        if self._admission is None:
            return True
        empty = sum(not self._placement.load(url, self._now) for url in self._engines)
        return self._admission.admits(session, self._now, self._now, capacity=self._capacity, empty=empty)

    def _ask(self, run: Run, n: int) -> None:
        session, call, urls = run.rollout.name, run.rollout.calls[n], list(self._engines)
        if self._sticky:
            url = self._placement.choose(session, self._bound.get(session, ""), urls, self._now)
        else:
            url = urls[preference(session, urls)[0]]
        name, self._bound[session] = f"{session}/{n}", url
        self._placement.begin(name, session, url, call.prompt)

        def done() -> None:
            self._placement.begin(name, session, url, call.prompt + call.sampled)
            self._placement.end(name, self._now)
            if self._created:
                self._later(0, self._admit)
                self._later(IDLE_SECONDS, self._admit)
            for later, begins in run.end(n, self._now):
                self._later(begins - self._now, partial(self._ask, run, later))
            if not run.order.is_active():
                self._placement.release(session, call.prompt + call.sampled)
                self._ends[run.rollout.group] = self._now
                self._begin()

        self._engines[url].add(Request(call, partial(run.rollout.block, n), done))


POLICIES = {"hash": {"sticky": False}, "sticky": {"sticky": True}, "admission": {"sticky": True, "admits": True}}
Outcome = dict[str, tuple[float, float]]
"""Policy → makespan, and mean time until a group is complete, in seconds."""


def replayed(load: Load, made: Sequence[Rollout]) -> Outcome:
    return {name: Replay(load, made, **policy).run() for name, policy in POLICIES.items()}


def ratios(found: Sequence[Outcome], policy: str, *, groups: bool = False) -> list[float]:
    """What a policy takes as a share of what the hash takes: the makespans, or the times of the groups."""
    return [one[policy][groups] / one["hash"][groups] for one in found]


def table(found: dict[str, list[Outcome]]) -> Table:
    """Medians over the seeds of each load."""
    rows = []
    for name, one in found.items():
        makespans = [f"{statistics.median(outcome[policy][0] for outcome in one):.0f}" for policy in ("hash", "sticky")]
        cells = [
            f"{statistics.median(ratios(one, policy, groups=groups)):.2f}" for policy in ("sticky", "admission") for groups in (False, True)
        ]
        sticky = ratios(one, "sticky")
        rows.append([name, *makespans, cells[0], f"{min(sticky):.2f} to {max(sticky):.2f}", *cells[1:]])
    return Table("", ["load", "hash, s", "sticky, s", "ratio", "from, to", "groups", "admission", "groups"], rows)


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__.partition("\n")[0])
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--loads", default=",".join(LOADS), help="names of loads, or their beginnings")
    asked.add_argument("--write", action="store_true", help="write the table into docs/several-engines.md")
    asked.add_argument("--trace", type=Path, help="replay the rollouts of this file, once, in place of those of the loads")
    options = asked.parse_args()
    if options.trace and options.write:
        asked.error("--write is for the loads of the page, not for a trace")
    traced = [recorded(options.trace)] if options.trace else None
    found: dict[str, list[Outcome]] = {}
    for name, load in LOADS.items():
        if any(name.startswith(wanted) for wanted in options.loads.split(",")):
            played = traced or [rollouts(load, seed) for seed in range(options.seeds)]
            found[name] = [replayed(load, made) for made in played]
    print(shown := table(found).markdown())
    if options.write:
        write("several-engines.md", {"placement": shown})


if __name__ == "__main__":
    main()

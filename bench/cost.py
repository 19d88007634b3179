"""Measures the cost of one call: the same body to every target, in changing order, one call at a time (README.md).

`run_exports`: how long calls wait while a large rollout is exported again and again.
"""

import contextlib
import itertools
import math
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import redis

from bench.client import Answer, Client, check_continued, reply_text, take_turn, turns
from bench.processes import ROOT, Process
from bench.stats import blocks, percentile, trimmed, us
from bench.talk import NEW, SMALL, Shape, Talk
from bench.targets import SLOW, Target

SLOW_CALLS = 12
AROUND = 4
"""Number of turns on either side of a mark of a growing session that are measured, too."""
BLOCKS = 5
LARGE = Shape(size=480_000, messages=200, tokens=2000)
"""The large session: about four bytes per token."""
_SPIN = "print('busy', flush=True)\nwhile True: pass"
_FETCH = """
from bench.client import Client
client = Client({port})
while client.get("{path}"):
    print("fetched", flush=True)
"""
_session = (f"cost-{time.monotonic_ns() % 10**9}-{n}" for n in itertools.count(1))


@dataclass(frozen=True)
class Case:
    """One kind of call, and how many to make; `own_system`, `answered`: as in `Talk`."""

    name: str
    shape: Shape
    calls: int
    per_session: int = 8
    own_system: bool = False
    answered: bool = False

    def talk(self, seed: str) -> Talk:
        return self.shape.talk(seed, self.per_session + 1, own_system=self.own_system, answered=self.answered)


class Rig:
    """The targets of a run in front of one engine, and a connection to each."""

    def __init__(self, engine: Process, targets: Mapping[str, Target]) -> None:
        self.engine, self.targets = engine, dict(targets)
        self.clients = {name: Client(target.ports[0]) for name, target in self.targets.items()}
        self.usual, self.slow = [name for name in targets if name not in SLOW], [name for name in targets if name in SLOW]
        self._turn = itertools.count(1)

    def close(self) -> None:
        for client in self.clients.values():
            client.close()

    def in_turn(self, more: Iterable[str] = ()) -> list[str]:
        """The targets that are not slow, and more, each time in another order."""
        names = [*self.usual, *more]
        at = next(self._turn) % len(names)
        return names[at:] + names[:at]


class Sample(NamedTuple):
    """One call, in seconds. `latency` is that of the whole call; for a paced stream, without its pauses."""

    latency: float
    cpu: float
    engine_cpu: float
    store_cpu: float


class MeasuredSession:
    """One session on each target that has sessions; the other targets get the same bodies."""

    def __init__(self, rig: Rig, shape: Shape, make: Callable[[str], Talk]) -> None:
        self.rig, self.shape = rig, shape
        self.session = next(_session)
        self.talks = {name: make(self.session) for name, target in rig.targets.items() if target.sessions}

    def body(self, name: str) -> bytes:
        return (self.talks.get(name) or next(iter(self.talks.values()))).body()

    def step(self) -> None:
        """A turn that is not measured."""
        for name, talk in self.talks.items():
            take_turn(self.rig.clients[name], talk, self.session, self.shape.tail)

    def look(self, targets: Sequence[str]) -> dict[str, Sample]:
        """A measured turn: one call to each of the targets, in this order."""
        seen = {name: self.observe(name, self.body(name)) for name in targets}
        for name, talk in self.talks.items():
            talk.add_turn(reply_text(seen[name][1]), self.shape.tail)
        return {name: sample for name, (sample, _) in seen.items()}

    def observe(self, name: str, body: bytes) -> tuple[Sample, Answer]:
        """Calls a target; raises the errors of `Client.post`."""
        target, client = self.rig.targets[name], self.rig.clients[name]
        if name in SLOW:  # these are called rarely, and LiteLLM closes connections that were idle for five seconds
            client.close()
            client = self.rig.clients[name] = Client(client.port)
        groups = [() if name == "direct" else target.processes, (self.rig.engine,), target.stores]
        before = settled(groups)
        answer = client.post(body, self.session if target.sessions else None)
        spent = [now - then for now, then in zip(settled(groups), before, strict=True)]
        lag = answer.ended - answer.sent if answer.sent else 0  # of a stream's last event
        latency = (answer.first - answer.begun + lag) / 1e9 if self.shape.chunks else answer.wall
        return Sample(latency, *spent), answer

    def check(self, made: int) -> None:
        """Checks that every one of so many calls continued the previous one. Raises the errors of `check_continued`."""
        for name in (name for name in self.talks if self.rig.targets[name].records):
            check_continued(self.rig.targets[name].ports, self.session, made)


def settled(groups: Sequence[Sequence[Process]]) -> list[float]:
    """The CPU time of groups of processes once they are idle, so that work left after a call counts."""

    before: list[float] = []
    for _ in range(21):
        now = [sum(process.cpu() for process in group) for group in groups]
        if now == before:
            break
        before = now
        time.sleep(0.0007)
    return before


def run_case(rig: Rig, case: Case) -> dict[str, Any]:
    """Measures a case. Each session begins with a call that is not measured; every measured call continues one."""
    samples: dict[str, list[Sample]] = {name: [] for name in rig.targets}
    for session in range(math.ceil(case.calls / case.per_session) + 1):
        played = MeasuredSession(rig, case.shape, case.talk)
        played.step()
        for _ in range(case.per_session):
            seen = played.look(rig.in_turn())
            for name, sample in seen.items() if session else ():  # the first session is a warm-up
                samples[name].append(sample)
        played.check(case.per_session + 1)
    body = played.body("direct")
    for name in rig.slow:  # apart from the others: these evict the processor's caches
        samples[name] = [played.observe(name, body)[0] for _ in range(SLOW_CALLS)]
    return {"case": case.name, "targets": summaries(samples)}


def run_growth(rig: Rig, sessions: int, marks: Sequence[int]) -> dict[str, Any]:
    """Grows sessions by 200 sampled and 200 new tokens a turn, and measures the calls around each mark, of slow targets the one at it."""
    found: dict[int, dict[str, list[Sample]]] = {mark: {name: [] for name in rig.targets} for mark in marks}
    bodies: dict[int, bytes] = {}
    before, tokens = stored(rig), 0
    for _ in range(sessions):
        played = MeasuredSession(rig, NEW, NEW.talk)
        for turn in range(1, marks[-1] + AROUND + 1):
            near = next((mark for mark in marks if abs(turn - mark) <= AROUND), None)
            if near is None:
                played.step()
                continue
            if turn == near:
                bodies[turn] = played.body("direct")
            for name, sample in played.look(rig.in_turn(rig.slow if turn == near else ())).items():
                found[near][name].append(sample)
        played.check(marks[-1] + AROUND)
        recorded = next(target for target in rig.targets.values() if target.records)
        last = turns(recorded.ports[0], played.session)[-1]
        tokens += last["prompt_tokens"] + last["completion_tokens"]
    kept = stored(rig) - before
    rows = [
        {"turn": mark, "body_bytes": len(body), "targets": summaries(found[mark]), "parse_us": {"objects": parse_us(body)}}
        for mark, body in bodies.items()
    ]
    return {"tokens": tokens, "redis_bytes": kept, "redis_bytes_per_token": round(kept / tokens, 2) if kept else None, "marks": rows}


def stored(rig: Rig) -> int:
    """Bytes that Redis reports for all its keys; 0 without Redis."""
    total = 0
    for store in (store for target in rig.targets.values() for store in target.stores):
        with redis.Redis(port=store.port) as link:
            total += sum(link.memory_usage(key, samples=0) or 0 for key in link.scan_iter(count=1000))
    return total


def summaries(samples: Mapping[str, Sequence[Sample]]) -> dict[str, dict[str, Any]]:
    return {name: summary(some) for name, some in samples.items() if some}


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Microseconds; `*_blocks`: medians of parts."""
    parts = blocks(samples, BLOCKS)
    latency = sorted(sample.latency for sample in samples)
    return {
        "n": len(samples),
        "p50_us": us(statistics.median(latency)),
        "p99_us": us(percentile(latency, 99)),
        "cpu_us": us(trimmed([sample.cpu for sample in samples])),
        "engine_cpu_us": us(trimmed([sample.engine_cpu for sample in samples])),
        "store_cpu_us": us(trimmed([sample.store_cpu for sample in samples])),
        "p50_blocks": [us(statistics.median(sample.latency for sample in part)) for part in parts],
        "cpu_blocks": [us(statistics.median(sample.cpu for sample in part)) for part in parts],
    }


def parse_us(body: bytes) -> float:
    """What it costs to make Python objects of a body."""
    return us(statistics.median(timeit.repeat(lambda: msgspec.json.decode(body), number=1, repeat=15)))


def run_exports(target: Target, calls: int, rounds: int) -> dict[str, Any]:
    """Measures small calls alone, beside a fetcher, and beside a process that only keeps a core busy, in turns.

    Fetcher and export worker keep a core busy, too. What they cost beyond that process is the time that the proxy itself stalls.
    """
    session, port = "bench-large", target.ports[0]
    talk = LARGE.talk(session)
    path = f"/tokencache/v1/sessions/{session}/trajectories?drift=off"
    surroundings = {"alone": "", "beside_busy": _SPIN, "beside_export": _FETCH.format(port=port, path=path)}
    walls: dict[str, list[float]] = {where: [] for where in surroundings}
    with contextlib.closing(Client(port)) as client:
        for _ in range(3):
            take_turn(client, talk, session, LARGE.tail)
        last = turns(port, session)[-1]
        size = len(client.get(path).body)  # the worker has started
        for n in range(rounds):
            for where, program in surroundings.items():
                with _running(program) if program else contextlib.nullcontext():
                    small = SMALL.talk(where, 9)
                    walls[where] += [take_turn(client, small, f"bench-small-{n}-{where}", SMALL.tail).wall for _ in range(calls)]
    figures = {where: {"p50_us": us(statistics.median(all_)), "p99_us": us(percentile(sorted(all_), 99))} for where, all_ in walls.items()}
    ratio = round(figures["beside_export"]["p50_us"] / figures["beside_busy"]["p50_us"], 2)
    tokens = last["prompt_tokens"] + last["completion_tokens"]
    return {"target": target.name, "tokens": tokens, "answer_bytes": size, **figures, "p50_ratio": ratio}


@contextlib.contextmanager
def _running(program: str) -> Iterator[None]:
    """Runs a program of Python alongside, from when it has printed a line."""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as beside:
        try:
            beside.stdout.readline()
            yield
        finally:
            beside.kill()

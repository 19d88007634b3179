"""Measures the cost of one call on an idle machine: the same body to every target, in changing order, one call at a time.

A session that grows to 200 turns shows whether a turn costs more if more turns precede it.
Disturbances of the machine affect all targets alike. Rely on ratios and differences of medians; absolute figures depend on the machine.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import redis

from bench.client import Client, Timed, lag, reply_text, take_turn, turns
from bench.processes import Process, waited
from bench.stats import blocks, percentile, trimmed, us
from bench.talk import NEW, Shape, Talk
from bench.targets import Target

SLOW = {"rerender", "litellm"}
"""Targets that are called only a few times: they are tens of milliseconds slower than the others."""

SLOW_CALLS = 12
AROUND = 4
"""Number of turns on either side of a mark of a growing session that are measured, too."""

BLOCKS = 5
_session = (f"cost-{time.monotonic_ns() % 10**9}-{n}" for n in itertools.count(1))
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


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

    def close(self) -> None:
        for client in self.clients.values():
            client.close()

    def call(self, name: str, body: bytes, session: str) -> Timed:
        """Calls a target; raises the errors of `Client.post`."""
        return self.clients[name].post(body, session if self.targets[name].sessions else None)

    def turns(self, name: str, session: str) -> list[dict[str, Any]]:
        return turns(self.targets[name].ports[0], session)

    def check(self, name: str, session: str, continued: int) -> None:
        """Checks that every call continued the previous one: figures count only if the proxy did its work."""
        if not self.targets[name].records:
            return
        kinds = [turn["match"] for turn in self.turns(name, session)]
        if kinds[1:] != ["continue"] * continued:
            raise RuntimeError(f"{name}: session {session} was not continued {continued} times: {kinds}")


class Sample(msgspec.Struct):
    """One call, in seconds. `latency` is that of the whole call; for a paced stream, without its pauses.

    `waited`: how long the processes involved, including this one, were ready to run without a core.
    """

    latency: float
    cpu: float
    engine_cpu: float
    waited: float
    store_cpu: float = 0.0


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

    def observe(self, name: str, body: bytes) -> tuple[Sample, Timed]:
        target = self.rig.targets[name]
        own = () if name == "direct" else target.processes
        if name in SLOW:  # these are called rarely, and LiteLLM closes connections that were idle for five seconds
            self.rig.clients[name].reopen()
        watched = [self.rig.engine, *own, *target.stores]
        before = settled(watched)
        idle = _waits(watched)
        answer = self.rig.call(name, body, self.session)
        delayed = _waits(watched) - idle
        spent = [now - then for now, then in zip(settled(watched), before, strict=True)]
        latency = answer.first + lag(answer) if self.shape.chunks else answer.wall
        cut = 1 + len(own)
        return Sample(latency, sum(spent[1:cut]), spent[0], delayed, sum(spent[cut:])), answer


def settled(processes: Sequence[Process]) -> list[float]:
    """The CPU time of the processes once they are idle, so that work left after a call counts."""
    before = [p.cpu() for p in processes]
    for _ in range(20):
        time.sleep(0.0007)
        now = [p.cpu() for p in processes]
        if now == before:
            break
        before = now
    return before


def _waits(processes: Sequence[Process]) -> float:
    return sum(p.waited() for p in processes) + waited("self")


def in_turn(names_: Sequence[str], n: int) -> list[str]:
    """The targets of the n-th measured turn, in an order that changes."""
    at = n % len(names_)
    return [*names_[at:], *names_[:at]]


def run_case(rig: Rig, case: Case) -> dict[str, Any]:
    """Measures a case. Each session begins with a call that is not measured; every measured call continues one."""
    samples: dict[str, list[Sample]] = {name: [] for name in rig.targets}
    sizes: list[int] = []
    usual = [name for name in rig.targets if name not in SLOW]
    first = True  # the first session is a warm-up
    n = 0
    while first or len(sizes) < case.calls:
        played = MeasuredSession(rig, case.shape, case.talk)
        played.step()
        for _ in range(case.per_session):
            n += 1
            body = played.body("direct")
            seen = played.look(in_turn(usual, n))
            if not first:
                sizes.append(len(body))
                for name, sample in seen.items():
                    samples[name].append(sample)
        first = False
        for name in played.talks:
            rig.check(name, played.session, case.per_session)
    for name in rig.targets.keys() - usual:  # apart from the others: these evict the processor's caches
        samples[name] = [played.observe(name, body)[0] for _ in range(SLOW_CALLS)]
    return {
        "case": case.name,
        "body_bytes": round(statistics.mean(sizes)),
        "chunks": case.shape.chunks,
        "tokens": case.shape.tokens,
        "targets": {name: summary(found) for name, found in samples.items() if found},
        "parse_us": parse_cost(body),
    }


def run_growth(rig: Rig, sessions: int, marks: Sequence[int]) -> dict[str, Any]:
    """Grows sessions turn by turn, with 200 sampled and about 200 new tokens each, and measures the calls around each mark.

    Slow targets are called once at each mark.
    """
    found: dict[int, dict[str, list[Sample]]] = {mark: {name: [] for name in rig.targets} for mark in marks}
    bodies: dict[int, bytes] = {}
    before, tokens = stored(rig), 0
    usual = [name for name in rig.targets if name not in SLOW]
    for _ in range(sessions):
        played = MeasuredSession(rig, NEW, NEW.talk)
        last = marks[-1] + AROUND
        for turn in range(1, last + 1):
            near = [mark for mark in marks if abs(turn - mark) <= AROUND]
            if near:
                body = played.body("direct")
                slow = [name for name in rig.targets if name in SLOW] if turn == near[0] else []
                for name, sample in played.look(in_turn(usual + slow, turn)).items():
                    found[near[0]][name].append(sample)
                if turn == near[0]:
                    bodies[turn] = body
            else:
                played.step()
        for name in played.talks:
            rig.check(name, played.session, last - 1)
        info = rig.turns(next(name for name in played.talks if rig.targets[name].records), played.session)
        tokens += info[-1]["prompt_tokens"] + info[-1]["completion_tokens"]
    kept = stored(rig) - before
    return {
        "sessions": sessions,
        "tokens": tokens,
        "redis_bytes": kept,
        "redis_bytes_per_token": round(kept / tokens, 2) if kept else None,
        "marks": [
            {
                "turn": mark,
                "body_bytes": len(bodies[mark]),
                "targets": {name: summary(samples) for name, samples in found[mark].items() if samples},
                "parse_us": parse_cost(bodies[mark]),
            }
            for mark in marks
        ],
    }


def stored(rig: Rig) -> int:
    """Bytes that Redis reports for all its keys; 0 without Redis."""
    total = 0
    for target in rig.targets.values():
        for store in target.stores:
            with redis.Redis(port=store.port) as link:
                total += sum(link.memory_usage(key, samples=0) or 0 for key in link.scan_iter(count=1000))
    return total


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Microseconds. `calm`: over the third of the calls whose processes waited least for a core; `*_blocks`: medians of parts."""
    calm = sorted(samples, key=lambda s: s.waited)[: max(1, len(samples) // 3)]
    latency = sorted(s.latency for s in samples)
    parts = blocks(samples, BLOCKS)
    return {
        "n": len(samples),
        "p50_us": us(statistics.median(latency)),
        "p99_us": us(percentile(latency, 99)),
        "calm_p50_us": us(statistics.median(s.latency for s in calm)),
        "cpu_us": us(trimmed([s.cpu for s in samples])),
        "engine_cpu_us": us(trimmed([s.engine_cpu for s in samples])),
        "store_cpu_us": us(trimmed([s.store_cpu for s in samples])),
        "p50_blocks": [us(statistics.median(s.latency for s in part)) for part in parts],
        "p99_blocks": [us(percentile(sorted(s.latency for s in part), 99)) for part in parts],
        "cpu_blocks": [us(statistics.median(s.cpu for s in part)) for part in parts],
    }


def parse_cost(body: bytes) -> dict[str, float]:
    """Measures what reading a body costs: to find its members and messages, and to make Python objects of it."""

    def split() -> None:
        _LIST.decode(_RAW.decode(body)["messages"])

    return {"split": us(best(split)), "objects": us(best(lambda: msgspec.json.decode(body)))}


def best(work: Callable[[], object], rounds: int = 15) -> float:
    def once() -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    return statistics.median(once() for _ in range(rounds))

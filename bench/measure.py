"""What is measured: the same body directly, through the bare relay and through the proxy, in turns within one run.

Whatever disturbs the machine disturbs all three alike; ratios and differences of medians are to be believed, absolute
figures only with the machine that they came from.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.client import Client, Timed, lag, said
from bench.processes import Process, waited
from bench.talk import Talk, names

PATHS = ("direct", "relay", "proxy")
_session = names("bench")
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True)
class Case:
    """One kind of call: `size` bytes of body in `messages` messages; `chunks` of a stream, 0 for none; `calls` to make."""

    name: str
    size: int
    messages: int
    calls: int
    tokens: int = 200
    tail: int = 800
    chunks: int = 0
    pace_ms: int = 1
    per_session: int = 8

    def talk(self, seed: str) -> Talk:
        grown = (self.tokens * 4 + self.tail + 100) * (self.per_session + 1) // 2
        more: dict[str, int | bool] = {"mock_tokens": self.tokens}
        if self.chunks:
            more |= {"stream": True, "mock_chunks": self.chunks, "mock_pace_ms": self.pace_ms}
        return Talk(seed, size=max(300, self.size - grown), messages=self.messages, **more)


@dataclass
class Rig:
    """The servers of a run and a connection to each path."""

    engine: Process
    relay: Process
    proxy: Process
    redis: Process | None = None
    clients: dict[str, Client] = field(default_factory=dict)

    def connect(self) -> None:
        for name, process in (("direct", self.engine), ("relay", self.relay), ("proxy", self.proxy)):
            if name in self.clients:
                self.clients[name].close()
            self.clients[name] = Client(process.port)

    def call(self, path: str, body: bytes, session: str | None) -> Timed:
        answer = self.clients[path].post(body, session if path == "proxy" else None)
        if answer.status != 200:
            raise RuntimeError(f"{path} answered {answer.status}: {answer.body[:300]!r}")
        return answer


class Sample(msgspec.Struct):
    """One call: seconds. `latency` is that of the whole call; of a paced stream what remains without its pauses.

    `waited`: how long the processes that took part, this one too, were ready to run and had no core.
    """

    latency: float
    first: float
    cpu: float
    engine_cpu: float
    waited: float
    store_cpu: float = 0.0


def settled(processes: Sequence[Process]) -> list[float]:
    """The CPU time of idle processes, once they are idle: what a call leaves to be done counts, too."""
    before = [p.cpu() for p in processes]
    for _ in range(20):
        time.sleep(0.0007)
        now = [p.cpu() for p in processes]
        if now == before:
            break
        before = now
    return before


def observe(rig: Rig, path: str, body: bytes, session: str | None, *, stream: bool) -> tuple[Sample, Timed]:
    between = {"direct": None, "relay": rig.relay, "proxy": rig.proxy}[path]
    watched = [p for p in (rig.engine, between, rig.redis if path == "proxy" else None) if p is not None]
    before = settled(watched)
    idle = _waits(watched)
    answer = rig.call(path, body, session)
    delayed = _waits(watched) - idle
    spent = [now - then for now, then in zip(settled(watched), before, strict=True)]
    latency = answer.first + lag(answer) if stream else answer.wall
    own = spent[1] if between is not None else 0.0
    return Sample(latency, answer.first, own, spent[0], delayed, spent[2] if len(spent) > 2 else 0.0), answer


def _waits(processes: Sequence[Process]) -> float:
    return sum(p.waited() for p in processes) + waited("self")


def run_case(rig: Rig, case: Case, tick: Callable[[], None]) -> dict[str, Any]:
    """Measure a case. Each session begins with a call that is not measured; every measured call continues one."""
    samples: dict[str, list[Sample]] = {path: [] for path in PATHS}
    sizes: list[int] = []
    sessions: list[str] = []
    warm = 1  # the first session is not counted
    rig.connect()
    while len(sizes) < case.calls:
        session = next(_session)
        talk = case.talk(session)
        talk.hear(said(rig.call("proxy", talk.body(), session)), case.tail)
        for n in range(case.per_session):
            body = talk.body()
            order = PATHS[n % 3 :] + PATHS[: n % 3]
            seen = {path: observe(rig, path, body, session, stream=case.chunks > 0) for path in order}
            talk.hear(said(seen["proxy"][1]), case.tail)
            if not warm:
                sizes.append(len(body))
                for path in PATHS:
                    samples[path].append(seen[path][0])
            tick()
        warm = 0
        sessions.append(session)
    check(rig, sessions, case.per_session)
    return {
        "case": case.name,
        "store": "redis" if rig.redis else "memory",
        "body_bytes": round(statistics.mean(sizes)),
        "chunks": case.chunks,
        "tokens": case.tokens,
        "n": len(sizes),
        **{path: summary(samples[path]) for path in PATHS},
        "parse_us": parse_cost(body),
    }


def check(rig: Rig, sessions: Sequence[str], continued: int) -> None:
    """No figure counts unless the proxy did its work: every measured call must have continued the one before."""
    for session in sessions:
        listed = json.loads(rig.clients["proxy"].get(f"/tokencache/v1/sessions/{session}/turns").body)
        kinds = [turn["match"] for turn in (listed["turns"] if isinstance(listed, dict) else listed)]
        if kinds[1:] != ["continue"] * continued:
            raise RuntimeError(f"session {session} was not continued: {kinds}")


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """Microseconds. `calm`: over the third of the calls whose processes waited least for a core."""
    calm = sorted(samples, key=lambda s: s.waited)[: max(1, len(samples) // 3)]
    latency = sorted(s.latency for s in samples)
    return {
        "p50_us": us(statistics.median(latency)),
        "p99_us": us(latency[min(len(latency) - 1, math.ceil(len(latency) * 0.99) - 1)]),
        "calm_p50_us": us(statistics.median(s.latency for s in calm)),
        "calm_cpu_us": us(statistics.median(s.cpu for s in calm)),
        "waited_p50_us": us(statistics.median(s.waited for s in samples)),
        "min_us": us(latency[0]),
        "first_p50_us": us(statistics.median(s.first for s in samples)),
        "cpu_us": us(trimmed([s.cpu for s in samples])),
        "engine_cpu_us": us(trimmed([s.engine_cpu for s in samples])),
        "store_cpu_us": us(trimmed([s.store_cpu for s in samples])),
    }


def trimmed(values: Sequence[float]) -> float:
    """The mean without the upper and lower tenth."""
    ordered = sorted(values)
    cut = len(ordered) // 10
    return statistics.fmean(ordered[cut : len(ordered) - cut] or ordered)


def us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def parse_cost(body: bytes) -> dict[str, float]:
    """What it costs to read a body at all: to find its members and messages, and to make Python objects of it."""

    def split() -> None:
        _LIST.decode(_RAW.decode(body)["messages"])

    return {"split": us(best(split)), "objects": us(best(lambda: msgspec.json.decode(body)))}


def best(work: Callable[[], object], rounds: int = 15) -> float:
    def once() -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    return statistics.median(once() for _ in range(rounds))


def run_growth(rig: Rig, sessions: int, marks: Sequence[int], around: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Grow sessions turn by turn and look at the calls within `around` turns of each mark."""
    case = Case("growth", 0, 2, 0)
    found: dict[int, dict[str, list[Sample]]] = {mark: {path: [] for path in PATHS} for mark in marks}
    bodies: dict[int, bytes] = {}
    rig.connect()
    before = stored(rig)
    tokens = 0
    for _ in range(sessions):
        session = next(_session)
        talk = Talk(session, size=1200, messages=2, mock_tokens=case.tokens)
        last = marks[-1] + around
        for turn in range(1, last + 1):
            body = talk.body()
            near = [mark for mark in marks if abs(turn - mark) <= around]
            if near:
                order = PATHS[turn % 3 :] + PATHS[: turn % 3]
                seen = {path: observe(rig, path, body, session, stream=False) for path in order}
                for path in PATHS:
                    found[near[0]][path].append(seen[path][0])
                answer = seen["proxy"][1]
                if turn == near[0]:
                    bodies[turn] = body
            else:
                answer = rig.call("proxy", body, session)
            talk.hear(said(answer), case.tail)
            tick()
        check(rig, [session], last - 1)
        info = turns_of(rig, session)
        tokens += info[-1]["prompt_tokens"] + info[-1]["completion_tokens"]
    grown = stored(rig)
    out: dict[str, Any] = {"store": "redis" if rig.redis else "memory", "sessions": sessions, "tokens": tokens, "marks": []}
    if rig.redis:
        out["stored_bytes"] = grown - before
        out["bytes_per_token"] = round((grown - before) / tokens, 2)
    for mark in marks:
        out["marks"].append(
            {
                "turn": mark,
                "body_bytes": len(bodies[mark]),
                "n": len(found[mark]["proxy"]),
                **{path: summary(found[mark][path]) for path in PATHS},
                "parse_us": parse_cost(bodies[mark]),
            }
        )
    return out


def turns_of(rig: Rig, session: str) -> list[dict[str, Any]]:
    listed = json.loads(rig.clients["proxy"].get(f"/tokencache/v1/sessions/{session}/turns").body)
    return list(listed["turns"] if isinstance(listed, dict) else listed)


def stored(rig: Rig) -> int:
    """Bytes that Redis says its keys take, all of them."""
    if rig.redis is None:
        return 0
    import redis  # noqa: PLC0415

    with redis.Redis(port=rig.redis.port) as link:
        return sum(link.memory_usage(key, samples=0) or 0 for key in link.scan_iter(count=1000))


def _with_ids(body: bytes, tokens: int) -> bytes:
    """The request as the proxy would send it: ids in, ids and log probabilities out."""
    ids = b",".join([b"151644"] * tokens)
    return body[:-1] + b',"return_token_ids":true,"logprobs":true,"kv_transfer_params":{"prompt_token_ids":[%s]}}' % ids


def engine_alone(engine: Process, relay: Process, seconds: float) -> dict[str, float]:
    """The mock engine by itself, one connection: how far is it from being the limit?

    And the floor under every proxy that carries ids: the bare relay moving them, nothing else.
    """
    body = Talk("alone", size=141_000, messages=200, mock_tokens=200).body()
    out: dict[str, float] = {}
    clients = {"direct": Client(engine.port), "relay": Client(relay.port)}
    for name, sent in (("plain", body), ("with_ids", _with_ids(body, 32_000))):
        walls: dict[str, list[float]] = {path: [] for path in clients}
        cpu = {"direct": engine.cpu(), "relay": relay.cpu()}
        engine_only = 0.0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            before = engine.cpu()
            walls["direct"].append(clients["direct"].post(sent).wall)
            engine_only += engine.cpu() - before
            walls["relay"].append(clients["relay"].post(sent).wall)
        calls = len(walls["direct"])
        direct, relayed = (statistics.median(walls[path]) for path in clients)
        out |= {
            f"{name}_p50_us": us(direct),
            f"{name}_calls_per_s": round(1 / direct),
            f"{name}_cpu_us": us(engine_only / calls),
            f"{name}_relay_added_p50_us": us(relayed - direct),
            f"{name}_relay_cpu_us": us((relay.cpu() - cpu["relay"]) / calls),
        }
    for client in clients.values():
        client.close()
    return out

"""Computes what 16 thousand, 160 thousand and 1.6 million concurrent rollouts need, from what the bench measured.

`python -m bench.scale bench/results.json [--write]` prints the tables of docs/several-engines.md; `--write` puts them there. A simulated
queue shows what the share of a core that is used does to latency, and is checked against the measured open loop.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.page import ms
from bench.stats import quantiles
from bench.tables import Table, write

ROLLOUTS = (16_000, 160_000, 1_600_000)
ENGINE_SECONDS, BUSY = 10.0, 0.6
"""How long a call is in flight, and the share of a core that is used."""
KEPT_STEPS = 2
"""Rollouts kept in Redis for each running one."""
IDLE_BYTES = 90 * 2**20
NIC_GBIT, NODE_CORES, REDIS_GIB = 25.0, 64, 64.0
"""A machine."""


class Load(NamedTuple):
    """The assumed load of a rollout. Bytes per token are of the harness's JSON text, `id_bytes` of an id in JSON."""

    turns_per_minute: float = 2.0
    turns: int = 50
    new_tokens: int = 400
    history_tokens: int = 33_000
    bytes_per_token: float = 4.3
    id_bytes: float = 7.0
    chunk_bytes: float = 250.0
    chunks: int = 200


class Costs(NamedTuple):
    """Costs of a call: seconds of CPU; bytes of memory per stream in flight and per stored token."""

    call_s: float
    chunk_s: float
    redis_s: float
    stream_bytes: float
    token_bytes: float


def costs(found: dict[str, Any]) -> Costs:
    """From a full run's raw figures: the 141 KB call with Redis, what 500 chunks add to it, a stream's memory."""
    rows = {row["case"]: row["targets"]["proxy redis"] for row in found["cost"]}
    whole, streamed = rows["141 KB"], rows["141 KB, 500 chunks"]
    stream = next(run for run in found["streams"] if run["target"] == "proxy memory")
    return Costs(
        call_s=whole["cpu_us"] / 1e6,
        chunk_s=max(0.0, streamed["cpu_us"] - whole["cpu_us"]) / 500 / 1e6,
        redis_s=whole["store_cpu_us"] / 1e6,
        stream_bytes=stream["bytes_per_stream"],
        token_bytes=found["growth"]["redis_bytes_per_token"],
    )


NEEDS = {
    "calls a second": ",.0f",
    "calls in flight": ",.0f",
    "proxy processes, a core each": ",",
    "memory of all proxies, GiB": ",.0f",
    "Redis shards, by CPU": ",",
    "Redis memory, GiB": ",.0f",
    "network of all proxies, Gbit/s": ",.1f",
}
"""What a number of rollouts needs, and how it is written."""


def need(rollouts: int, load: Load, cost: Costs) -> dict[str, float]:
    """What this many rollouts need, by the names of `NEEDS`."""
    calls = rollouts * load.turns_per_minute / 60
    proxies = max(1, math.ceil(calls * (cost.call_s + load.chunks * cost.chunk_s) / BUSY))
    in_flight = calls * ENGINE_SECONDS
    body = load.history_tokens * load.bytes_per_token
    engine_bytes = body + 2 * load.history_tokens * load.id_bytes  # text and ids to the engine, the prompt echo back
    # A call in flight holds its body and its ids, and what a stream takes.
    proxy_bytes = proxies * IDLE_BYTES + in_flight * (cost.stream_bytes + body)
    shards = max(1, math.ceil(calls * cost.redis_s / BUSY))
    redis_bytes = rollouts * KEPT_STEPS * load.turns * load.new_tokens * cost.token_bytes
    network_bytes = calls * (body + engine_bytes + 2 * load.chunks * load.chunk_bytes)
    values = calls, in_flight, proxies, proxy_bytes / 2**30, shards, redis_bytes / 2**30, network_bytes * 8 / 1e9
    return dict(zip(NEEDS, values, strict=True))


def first_bottleneck(one: dict[str, float]) -> str:
    """The scarcest resource, in machines: nodes of proxies by their cores or their network, Redis by CPU or by memory."""
    machines = {
        "proxy CPU": one["proxy processes, a core each"] / NODE_CORES,
        "network": one["network of all proxies, Gbit/s"] / NIC_GBIT,
        "Redis CPU": one["Redis shards, by CPU"] / NODE_CORES,
        "Redis memory": one["Redis memory, GiB"] / REDIS_GIB,
    }
    name = max(machines, key=machines.__getitem__)
    return f"{name} ({machines[name]:.1f} machines)"


def needs_table(load: Load, cost: Costs) -> Table:
    needs = [need(rollouts, load, cost) for rollouts in ROLLOUTS]
    rows = [[name, *(format(one[name], form) for one in needs)] for name, form in NEEDS.items()]
    rows.append(["scarce first", *map(first_bottleneck, needs)])
    return Table("", ["concurrent rollouts", *(f"{n:,}" for n in ROLLOUTS)], rows)


def costs_table(cost: Costs) -> Table:
    rows = [
        ["a call of 141 KB (33,000 tokens), proxy with Redis", f"{cost.call_s * 1e6:,.0f} µs of CPU"],
        ["each chunk of a stream", f"{cost.chunk_s * 1e6:,.1f} µs"],
        ["the same call in Redis", f"{cost.redis_s * 1e6:,.0f} µs"],
        ["a stream in flight", f"{cost.stream_bytes / 1024:,.0f} KiB of the proxy's memory"],
        ["a stored token", f"{cost.token_bytes:.1f} bytes of Redis' memory"],
    ]
    return Table("", ["measured", "figure"], rows)


Draw = Callable[[random.Random], float]


def empirical(percentiles: Sequence[float]) -> Draw:
    """Values distributed as these percentiles (0, 1, … 100), evenly between two of them."""

    def draw(rng: random.Random) -> float:
        at = rng.random() * (len(percentiles) - 1)
        low = int(at)
        return percentiles[low] + (at - low) * (percentiles[low + 1] - percentiles[low])

    return draw


def simulate(rate: float, service: Draw, calls: int = 50_000, seed: int = 1) -> list[float]:
    """The percentiles 0 to 100 of the time from arrival to end in a proxy process, in the unit of `service`; `rate` per that unit.

    Calls arrive at random (Poisson), and are served one after the other: a process has one event loop. The engine's time, and calls of one
    session that wait for each other, are not modelled. The first tenth is not counted: the queue has to fill first. `ValueError`: more
    arrives than can be served.
    """
    rng = random.Random(seed)
    mean = sum(service(rng) for _ in range(2_000)) / 2_000
    if rate * mean >= 1:
        raise ValueError(f"overloaded: {rate * mean:.2f} of what can be served")
    free = now = 0.0
    found = []
    for n in range(calls):
        now += rng.expovariate(rate)
        free = max(now, free) + service(rng)
        if n >= calls // 10:
            found.append(free - now)
    return quantiles(found)


def checked(opened: dict[str, Any]) -> Table:
    """The simulation next to the measured open loop.

    Service times: the distribution of the latencies at the lowest rate, where calls hardly wait for each other. Part of these is the
    engine and the network, during which no proxy is busy. So they are scaled to the mean CPU of a call.
    """
    runs = sorted((run for run in opened["runs"] if run["target"] == "proxy memory"), key=lambda run: float(run["rate"]))
    lowest, cpu_us = runs[0]["latency_us"], opened["cpu_us"]
    service = empirical([cpu_us / statistics.fmean(lowest) * value for value in lowest])
    beside = max(0.0, lowest[50] - simulate(runs[0]["rate"] / 1e6, service)[50])  # the engine's part of a call, and the network
    rows = []
    for run in runs:
        predicted = simulate(run["rate"] / 1e6, service)
        pairs = [(predicted[q] + beside, run["latency_us"][q]) for q in (50, 99)]
        rows.append([f"{run['rate']:,.0f}", f"{run['rate'] * cpu_us / 1e6:.0%}", *(ms(value) for pair in pairs for value in pair)])
    head = ["calls/s", "core used", "p50 predicted", "measured", "p99 predicted", "measured"]
    return Table("", head, rows, "ms, 141 KB, proxy memory; the first row fits the time outside the core, the others are predictions")


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.scale", description="What many rollouts need, from a run's raw figures.")
    asked.add_argument("results", type=Path, help="raw JSON of a full run")
    asked.add_argument("--write", action="store_true", help="write the tables into docs/several-engines.md")
    options = asked.parse_args()
    found = json.loads(options.results.read_text())
    cost, usual = costs(found), Load()
    tables = {"costs": costs_table(cost), "streamed": needs_table(usual, cost), "whole": needs_table(usual._replace(chunks=0), cost)}
    parts = {name: table.markdown() for name, table in (tables | {"queue": checked(found["open"])}).items()}
    print(*parts.values(), sep="\n\n")
    if options.write:
        write("several-engines.md", parts)


if __name__ == "__main__":
    main()

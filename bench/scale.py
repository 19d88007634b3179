"""Computes what 16 thousand, 160 thousand and 1.6 million concurrent rollouts need, from what the bench measured.

    python -m bench.scale bench/results.json [--write]

prints the tables of docs/several-engines.md; `--write` puts them there. The model: each rollout makes a fixed number of calls per
minute; each call costs a proxy CPU, Redis CPU, memory and network as one of the measured bodies does; a core is used up to `busy`. The
queueing simulation (bench/queueing.py) shows the effect of that share on latency, and is checked against the measured open loop.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.page import markdown, replaced
from bench.queueing import Draw, empirical, simulate
from bench.report import Shown, ms

DOC = Path(__file__).parent.parent / "docs" / "several-engines.md"
ROLLOUTS = (16_000, 160_000, 1_600_000)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The assumed load of a rollout. Bytes per token are of the harness's JSON text, `id_bytes` of an id in JSON."""

    turns_per_minute: float = 2.0
    turns: int = 50
    new_tokens: int = 400
    sampled_tokens: int = 200
    history_tokens: int = 33_000
    bytes_per_token: float = 4.3
    id_bytes: float = 7.0
    chunk_bytes: float = 250.0
    chunks: int = 200
    busy: float = 0.6


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a call: seconds of CPU; bytes of memory per stream in flight and per stored token."""

    call_s: float
    chunk_s: float
    redis_s: float
    stream_bytes: float
    token_bytes: float
    idle_bytes: float = 90 * 2**20


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a number of rollouts needs."""

    rollouts: int
    calls_per_s: float
    in_flight: float
    proxies: int
    proxy_gib: float
    redis_shards: int
    redis_gib: float
    network_gbit: float


def costs(found: dict[str, Any]) -> Costs:
    """From a run's raw figures: the 141 KB call with Redis, what 500 chunks add to it, a stream's memory.

    Raises:
        KeyError: The run lacks a part; a full run has all.
    """
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


def need(rollouts: int, load: Load, cost: Costs, *, engine_s: float = 10.0, kept_steps: float = 2.0) -> Need:
    """What this many rollouts need. `engine_s`: how long a call is in flight; `kept_steps`: rollouts kept in Redis per running one."""
    calls = rollouts * load.turns_per_minute / 60
    cpu = calls * (cost.call_s + load.chunks * cost.chunk_s)
    proxies = max(1, math.ceil(cpu / load.busy))
    in_flight = calls * engine_s
    prompt = load.history_tokens
    body = prompt * load.bytes_per_token
    engine_bytes = body + 2 * prompt * load.id_bytes  # text and ids to the engine, the prompt echo back
    reply = load.chunks * load.chunk_bytes
    final = load.turns * load.new_tokens
    return Need(
        rollouts=rollouts,
        calls_per_s=calls,
        in_flight=in_flight,
        proxies=proxies,
        # A call in flight holds its body and its ids, and what a stream takes.
        proxy_gib=(proxies * cost.idle_bytes + in_flight * (cost.stream_bytes + body)) / 2**30,
        redis_shards=max(1, math.ceil(calls * cost.redis_s / load.busy)),
        redis_gib=rollouts * kept_steps * final * cost.token_bytes / 2**30,
        network_gbit=calls * (body + engine_bytes + 2 * reply) * 8 / 1e9,
    )


def first_bottleneck(one: Need, *, nic_gbit: float = 25.0, node_cores: int = 64, redis_gib: float = 64.0) -> str:
    """The scarcest resource, in machines: nodes of proxies by their cores or their network, Redis by CPU or by memory."""
    machines = {
        "proxy CPU": one.proxies / node_cores,
        "network": one.network_gbit / nic_gbit,
        "Redis CPU": one.redis_shards / node_cores,
        "Redis memory": one.redis_gib / redis_gib,
    }
    name = max(machines, key=lambda what: machines[what])
    return f"{name} ({machines[name]:.1f} machines)"


def table(load: Load, cost: Costs) -> Shown:
    needs = [need(rollouts, load, cost) for rollouts in ROLLOUTS]
    rows = [
        ["calls a second", *(f"{one.calls_per_s:,.0f}" for one in needs)],
        ["calls in flight", *(f"{one.in_flight:,.0f}" for one in needs)],
        ["proxy processes, a core each", *(f"{one.proxies:,}" for one in needs)],
        ["memory of all proxies, GiB", *(f"{one.proxy_gib:,.0f}" for one in needs)],
        ["Redis shards, by CPU", *(f"{one.redis_shards:,}" for one in needs)],
        ["Redis memory, GiB", *(f"{one.redis_gib:,.0f}" for one in needs)],
        ["network of all proxies, Gbit/s", *(f"{one.network_gbit:,.1f}" for one in needs)],
        ["scarce first", *(first_bottleneck(one) for one in needs)],
    ]
    return Shown("", ["concurrent rollouts", *(f"{n:,}" for n in ROLLOUTS)], rows)


def costs_table(cost: Costs) -> Shown:
    rows = [
        ["a call of 141 KB (33,000 tokens), proxy with Redis", f"{cost.call_s * 1e6:,.0f} µs of CPU"],
        ["each chunk of a stream", f"{cost.chunk_s * 1e6:,.1f} µs"],
        ["the same call in Redis", f"{cost.redis_s * 1e6:,.0f} µs"],
        ["a stream in flight", f"{cost.stream_bytes / 1024:,.0f} KiB of the proxy's memory"],
        ["a stored token", f"{cost.token_bytes:.1f} bytes of Redis' memory"],
    ]
    return Shown("", ["measured", "figure"], rows)


def service_of(runs: Sequence[dict[str, Any]], cpu_us: float) -> Draw:
    """Service times: the distribution of the latencies at the lowest rate, scaled to the mean CPU of a call.

    At a low rate calls hardly wait for each other, so that distribution is nearly that of the service. But part of it is the engine and the
    network, during which no proxy is busy. Therefore the mean is that of the CPU.
    """
    lowest = min(runs, key=lambda run: float(run["rate"]))["latency_us"]
    factor = cpu_us / statistics.fmean(lowest)
    return empirical([factor * value for value in lowest])


def checked(found: dict[str, Any], name: str = "proxy memory") -> Shown:
    """The simulation next to the measured open loop."""
    opened = found["open"]
    runs = sorted((run for run in opened["runs"] if run["target"] == name), key=lambda run: float(run["rate"]))
    service = service_of(runs, opened["cpu_us"])
    # What a call takes apart from its time on the proxy's core: the engine's part and the network.
    idle = simulate(runs[0]["rate"] / 1e6, service)
    beside = max(0.0, runs[0]["latency_us"][50] - idle[50])
    rows = []
    for run in runs:
        try:
            predicted = simulate(run["rate"] / 1e6, service)
        except ValueError as overloaded:
            rows.append([f"{run['rate']:,.0f}", "", str(overloaded), ms(run["latency_us"][50]), "", ms(run["latency_us"][99])])
            continue
        share = run["rate"] * opened["cpu_us"] / 1e6
        pairs = [(predicted[q] + beside, run["latency_us"][q]) for q in (50, 99)]
        rows.append([f"{run['rate']:,.0f}", f"{share:.0%}", *(ms(value) for pair in pairs for value in pair)])
    head = ["calls/s", "core used", "p50 predicted", "measured", "p99 predicted", "measured"]
    return Shown("", head, rows, f"ms, 141 KB, {name}; the first row fits the time outside the core, the others are predictions")


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.scale", description="What many rollouts need, from a run's raw figures.")
    asked.add_argument("results", type=Path, help="raw JSON of a full run")
    asked.add_argument("--write", action="store_true", help="write the tables into docs/several-engines.md")
    options = asked.parse_args()
    found = json.loads(options.results.read_text())
    cost = costs(found)
    usual = Load()
    whole = msgspec.structs.replace(usual, chunks=0)
    parts = {"costs": costs_table(cost), "streamed": table(usual, cost), "whole": table(whole, cost), "queue": checked(found)}
    text = DOC.read_text() if options.write else ""
    for name, shown in parts.items():
        print(markdown(shown), end="\n\n")
        if options.write:
            text = replaced(text, name, markdown(shown))
    if options.write:
        DOC.write_text(text)


if __name__ == "__main__":
    main()

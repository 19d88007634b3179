"""Metrics: what `/metrics` shows. docs/operations.md explains each one; every label has few values.

Where several workers share a port (`server.workers`), who asks one of them is told of all: each keeps its figures in a file that the
others read, as `prometheus_client` does it where the environment names a directory (https://prometheus.github.io/client_python/multiprocess/).
Counters are summed up, those of workers that died included; what is now, of those that live.
"""

import functools
import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series of creation times beside every counter helps nobody

REGISTRY = CollectorRegistry()

CALLS = Counter("tokencache_calls", "Model calls within sessions, by how they ended.", ["dialect", "outcome"], registry=REGISTRY)
TURNS = Counter("tokencache_turns", "Recorded turns, by how their prompt came about.", ["match", "reason"], registry=REGISTRY)
TOKENS = Counter("tokencache_tokens", "Tokens of recorded turns.", ["part"], registry=REGISTRY)
PROMPT_TOKENS, COMPLETION_TOKENS = TOKENS.labels("prompt"), TOKENS.labels("completion")
FORGIVEN = Counter("tokencache_forgiven", "Canonicalisation rules that were needed to recognise a reply.", ["rule"], registry=REGISTRY)
REPLACED = Counter("tokencache_sampling_replaced", "Sampling parameters of a harness that a policy replaced.", ["name"], registry=REGISTRY)
INCIDENTS = Counter("tokencache_incidents", "Incidents noted on sessions.", ["kind"], registry=REGISTRY)
STORE_ERRORS = Counter("tokencache_store_errors", "Operations that the store failed.", ["operation"], registry=REGISTRY)
RELAYED = Counter("tokencache_relayed", "Requests relayed untouched.", ["status"], registry=REGISTRY)
IN_FLIGHT = Gauge(
    "tokencache_calls_in_flight",
    "Model calls within sessions that have begun and not ended.",
    multiprocess_mode="livesum",
    registry=REGISTRY,
)
OVERHEAD = Histogram(
    "tokencache_added_seconds",
    "Time from a request's last byte to its sending, and from the reply's end to its last byte.",
    ["phase"],
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0),
    registry=REGISTRY,
)
BEFORE, AFTER = OVERHEAD.labels("before"), OVERHEAD.labels("after")
ENGINE_LEVEL = Gauge(  # of several workers the one that found least: what it sends there is not exact
    "tokencache_engine_exact",
    "1 where the engine takes exact ids, else 0.",
    ["engine", "model"],
    multiprocess_mode="livemin",
    registry=REGISTRY,
)
ENGINE_UP = Gauge(  # of several workers any: they start one after another
    "tokencache_engine_up",
    "1 where the engine answers and was probed, else 0.",
    ["engine"],
    multiprocess_mode="livemax",
    registry=REGISTRY,
)
ENGINE_CALLS = Counter("tokencache_engine_calls", "Model calls within sessions that were sent to an engine.", ["engine"], registry=REGISTRY)
REPEATS = Counter("tokencache_repeats", "Calls that asked for what had been asked before, by what came of it.", ["how"], registry=REGISTRY)
HELD = Counter("tokencache_held", "Times that a call within a session was held because no engine took it.", ["why"], registry=REGISTRY)
WORKER_RESTARTS = Counter("tokencache_worker_restarts", "Workers that were started because one had died.", registry=REGISTRY)


@functools.cache
def counter(family: Counter, *labels: str) -> Counter:
    """The one counter of a family that has these labels: to look it up by `labels` costs several times what counting does."""
    return family.labels(*labels)


def shown() -> bytes:
    """Write what `/metrics` shows, in Prometheus' text format: of this process, or of all workers that it is one of."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return generate_latest(REGISTRY)
    everyone = CollectorRegistry()
    MultiProcessCollector(everyone, path=folder)  # type: ignore[no-untyped-call]
    return generate_latest(everyone)

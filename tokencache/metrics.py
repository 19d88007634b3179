"""Defines the Prometheus metrics that the proxy serves at `/metrics`. docs/operations.md explains each one. Every label has few values.

If several workers share a port (`server.workers`), each one reports the metrics of all. Each writes its values to files that the others
read (`prometheus_client` in multiprocess mode: https://prometheus.github.io/client_python/multiprocess/). Counters are summed, including
those of workers that died. Gauges come from live workers only.
"""

import functools
import os
from bisect import bisect_left
from collections.abc import Callable

import prometheus_client
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

disable_created_metrics()  # type: ignore[no-untyped-call]  # creation times would only double the series

REGISTRY = CollectorRegistry()


class Counter(prometheus_client.Counter):
    """A counter. `add` adds an amount in one call; only a counter with all its labels has it."""

    add: Callable[[float], None]

    def _metric_init(self) -> None:
        super()._metric_init()
        self.add = self._value.inc


class Gauge(prometheus_client.Gauge):
    """A gauge, like `Counter`; `add` also takes an amount below 0."""

    add: Callable[[float], None]

    def _metric_init(self) -> None:
        super()._metric_init()
        self.add = self._value.inc


class Histogram(prometheus_client.Histogram):
    """A histogram that does not check each time whether all labels are given."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """See prometheus_client; exemplars are not used."""
        del exemplar
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)


CALLS = Counter("tokencache_calls", "Model calls in sessions, by how they ended.", ["dialect", "outcome"], registry=REGISTRY)
TURNS = Counter("tokencache_turns", "Recorded turns, by how their prompt was built.", ["match", "reason"], registry=REGISTRY)
TURN_VERSIONS = Counter(
    "tokencache_turn_versions", "Recorded turns, by who reported the policy version of their tokens.", ["source"], registry=REGISTRY
)
TOKENS = Counter("tokencache_tokens", "Tokens of recorded turns.", ["part"], registry=REGISTRY)
PROMPT_TOKENS, COMPLETION_TOKENS = TOKENS.labels("prompt"), TOKENS.labels("completion")
APPLIED_RULES = Counter("tokencache_forgiven", "Rules that were applied to recognise a reply.", ["rule"], registry=REGISTRY)
LOST_TEXT = Counter(
    "tokencache_lost_text",
    "Turns that were compared with what was served when somebody looked at them: nothing lost, text lost, or unknown.",
    ["result"],
    registry=REGISTRY,
)
REPLACED = Counter("tokencache_sampling_replaced", "Sampling parameters that a policy replaced.", ["name"], registry=REGISTRY)
FINISHED = Counter(
    "tokencache_sessions_finished",
    "Sessions that were finished, by their outcome then; `other` are words of the callers.",
    ["outcome"],
    registry=REGISTRY,
)
SESSION_ENDS = Counter(
    "tokencache_session_ends",
    "Ends of sessions that were told to what places sessions behind the engines' URLs: told, no-route or failed.",
    ["result"],
    registry=REGISTRY,
)
WAITED = Counter(
    "tokencache_waited_seconds",
    "Seconds that trainers waited for finished sessions, and that finished sessions waited until a trainer took them.",
    ["who"],
    registry=REGISTRY,
)
QUEUE_SESSIONS = Gauge(
    "tokencache_queue_sessions",
    "Sessions in the queue: ready, with a call in flight, taken, and those of them that are not taken and not valid.",
    ["state"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
QUEUE_GROUPS = Gauge(
    "tokencache_queue_groups",
    "Groups in the queue: ready, short of sessions, short of rewards, or not asked for by any consumer.",
    ["state"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
QUEUE_OLDEST = Gauge(
    "tokencache_queue_oldest_seconds",
    "Seconds for which the oldest group in the queue has waited, by the same states.",
    ["state"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
STORE_BYTES = Gauge("tokencache_store_bytes", "Bytes that the store takes.", multiprocess_mode="livemostrecent", registry=REGISTRY)
STORE_SHARE = Gauge(
    "tokencache_store_used_ratio",
    "Share of the store's nearest limit (bytes or sessions) that is used. At 1 it accepts no new sessions. NaN without a limit.",
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
INCIDENTS = Counter("tokencache_incidents", "Incidents added to sessions.", ["kind"], registry=REGISTRY)
STORE_ERRORS = Counter("tokencache_store_errors", "Failed operations of the store.", ["operation"], registry=REGISTRY)
RELAYED = Counter("tokencache_relayed", "Requests relayed to the engine unchanged.", ["status"], registry=REGISTRY)
IN_FLIGHT = Gauge(
    "tokencache_calls_in_flight",
    "Model calls in sessions that have begun and not ended.",
    multiprocess_mode="livesum",
    registry=REGISTRY,
)
UNSAVED = Gauge(
    "tokencache_unsaved",
    "Calls and incidents that wait in this process for the store and for no client. They are lost if the process is killed.",
    multiprocess_mode="livesum",
    registry=REGISTRY,
)
_REQUEST_MEMORY = Gauge(
    "tokencache_request_memory_bytes",
    "Bytes in memory for requests now: incomplete heads, bodies, fetched media, and replies that are read whole.",
    ["what"],
    multiprocess_mode="livesum",
    registry=REGISTRY,
)
REQUEST_MEMORY = {what: _REQUEST_MEMORY.labels(what) for what in ("head", "body", "media", "reply")}
REQUEST_MEMORY_REFUSED = Counter(
    "tokencache_request_memory_refused", "Requests refused because they would pass --request-memory.", ["what"], registry=REGISTRY
)
OVERHEAD = Histogram(
    "tokencache_added_seconds",
    "Time that the proxy adds: from a request's last byte to its sending (before), and from the reply's end to its last byte (after).",
    ["phase"],
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0),
    registry=REGISTRY,
)
CALL_SECONDS = Histogram(
    "tokencache_call_seconds",
    "Time of model calls in sessions, from a request's last byte to the reply's last byte, waiting for engines included.",
    buckets=(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
    registry=REGISTRY,
)
BEFORE, AFTER = OVERHEAD.labels("before"), OVERHEAD.labels("after")
ENGINE_LEVEL = Gauge(  # the lowest value of all workers: one worker whose calls are not exact must be visible
    "tokencache_engine_exact",
    "1 if the engine accepts exact token ids, else 0.",
    ["engine", "model"],
    multiprocess_mode="livemin",
    registry=REGISTRY,
)
ENGINE_KV = Gauge(
    "tokencache_engine_kv_tokens",
    "Tokens that the engine's KV cache holds. NaN if that is not known.",
    ["engine"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
ENGINE_LIVE = Gauge(
    "tokencache_engine_live_tokens",
    "Tokens on the engine of calls in flight, and of sessions that paused less than three seconds ago.",
    ["engine"],
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
SESSIONS_FIT = Gauge(
    "tokencache_sessions_fit",
    "Sessions that fit into the KV caches: 0.9 of their tokens over the mean footprint of ended sessions. NaN if that is not known.",
    multiprocess_mode="livemostrecent",
    registry=REGISTRY,
)
SESSIONS_WAITING = Gauge(
    "tokencache_sessions_waiting",
    "Sessions that wait to be created because the KV caches have no room (`--admission`).",
    multiprocess_mode="livesum",
    registry=REGISTRY,
)
ENGINE_UP = Gauge(  # the highest value of all workers: one that starts later has not probed yet
    "tokencache_engine_up",
    "1 if the engine responds and was probed, else 0.",
    ["engine"],
    multiprocess_mode="livemax",
    registry=REGISTRY,
)
ENGINE_CALLS = Counter("tokencache_engine_calls", "Model calls in sessions sent to an engine.", ["engine"], registry=REGISTRY)
RETRIED_CALLS = Counter("tokencache_repeats", "Calls that retry an earlier call, by how they were served.", ["how"], registry=REGISTRY)
QUEUED_CALLS = Counter("tokencache_held", "Times that a call was queued because no engine accepted it.", ["why"], registry=REGISTRY)
CONTINUED = Counter(
    "tokencache_continued", "Replies that an engine broke off and that were continued, by how they ended.", ["ended"], registry=REGISTRY
)
IMAGES = Counter(
    "tokencache_images",
    "Images in exact conversations: sent with their pixels, only named because the engine has them, or missed there and sent again.",
    ["how"],
    registry=REGISTRY,
)
PREFIXES = Counter(
    "tokencache_prefixes",
    "Exact prompts for engines with the plugin: with a prefix by its hash, with all ids, or missed there and sent with all ids.",
    ["how"],
    registry=REGISTRY,
)
PREFIX_BYTES_SAVED = Counter(
    "tokencache_prefix_saved_bytes",
    "Bytes of ids in requests and answers that the plugin made unnecessary, compared with ids as JSON.",
    registry=REGISTRY,
)
BACKGROUND_FAILURES = Counter(
    "tokencache_background_failures", "Steps of background tasks that failed unexpectedly, and were repeated.", ["task"], registry=REGISTRY
)
CLOCK_STEPS = Counter(
    "tokencache_clock_steps",
    "Times that a clock was set by 10 seconds or more while the proxy ran: that of its system (or it was suspended), or that of Redis.",
    ["clock"],
    registry=REGISTRY,
)
WORKER_RESTARTS = Counter("tokencache_worker_restarts", "Workers restarted because one had died.", registry=REGISTRY)


@functools.cache
def counter(family: Counter, *labels: str) -> Counter:
    """Return the counter of a family with these labels. Cached, because `Counter.labels` takes several times as long as counting."""
    return family.labels(*labels)


def exposition() -> bytes:
    """Return the metrics in Prometheus' text format: of this process, or of all workers if it is one of several."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return generate_latest(REGISTRY)
    all_workers = CollectorRegistry()
    MultiProcessCollector(all_workers, path=folder)  # type: ignore[no-untyped-call]
    return generate_latest(all_workers)

"""Defines the Prometheus metrics that the proxy serves at `/metrics`. docs/operations.md explains each one. Every label has few values.

If several workers share a port (`server.workers`), each one reports the metrics of all. Each writes its values to files that the others
read (`prometheus_client` in multiprocess mode: https://prometheus.github.io/client_python/multiprocess/). Counters are summed, including
those of workers that died. Gauges come from live workers only.
"""

import functools
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

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


_counter = functools.partial(Counter, registry=REGISTRY)
_histogram = functools.partial(Histogram, registry=REGISTRY)
_gauge = functools.partial(Gauge, registry=REGISTRY)
_newest = functools.partial(_gauge, multiprocess_mode="livemostrecent")
_sum = functools.partial(_gauge, multiprocess_mode="livesum")
"""Gauges of which the newest value of all workers is served, or the sum of their values."""

CALLS = _counter("tokencache_calls", "Model calls in sessions, by how they ended.", ["dialect", "outcome"])
TURNS = _counter("tokencache_turns", "Recorded turns, by how their prompt was built.", ["match", "reason"])
TURN_VERSIONS = _counter("tokencache_turn_versions", "Recorded turns, by who reported the policy version of their tokens.", ["source"])
TOKENS = _counter("tokencache_tokens", "Tokens of recorded turns.", ["part"])
PROMPT_TOKENS, COMPLETION_TOKENS = TOKENS.labels("prompt"), TOKENS.labels("completion")
APPLIED_RULES = _counter("tokencache_forgiven", "Rules that were applied to recognise a reply.", ["rule"])
LOST_TEXT = _counter(
    "tokencache_lost_text",
    "Turns that were compared with what was served when somebody looked at them: nothing lost, text lost, or unknown.",
    ["result"],
)
REPLACED = _counter("tokencache_sampling_replaced", "Sampling parameters that a policy replaced.", ["name"])
FINISHED = _counter(
    "tokencache_sessions_finished", "Sessions that were finished, by their outcome then; `other` are words of the callers.", ["outcome"]
)
SESSION_ENDS = _counter(
    "tokencache_session_ends",
    "Ends of sessions that were told to what places sessions behind the engines' URLs: told, no-route or failed.",
    ["result"],
)
WAITED = _counter(
    "tokencache_waited_seconds",
    "Seconds that trainers waited for finished sessions, and that finished sessions waited until a trainer took them.",
    ["who"],
)
QUEUE_SESSIONS = _newest(
    "tokencache_queue_sessions",
    "Sessions in the queue: ready, with a call in flight, taken, and those of them that are not taken and not valid.",
    ["state"],
)
QUEUE_GROUPS = _newest(
    "tokencache_queue_groups",
    "Groups in the queue: ready, short of sessions, short of rewards, or not asked for by any consumer.",
    ["state"],
)
QUEUE_OLDEST = _newest(
    "tokencache_queue_oldest_seconds", "Seconds for which the oldest group in the queue has waited, by the same states.", ["state"]
)
STORE_BYTES = _newest("tokencache_store_bytes", "Bytes that the store takes.")
STORE_SHARE = _newest(
    "tokencache_store_used_ratio",
    "Share of the store's nearest limit (bytes or sessions) that is used. At 1 it accepts no new sessions. NaN without a limit.",
)
INCIDENTS = _counter("tokencache_incidents", "Incidents added to sessions.", ["kind"])
STORE_ERRORS = _counter("tokencache_store_errors", "Failed operations of the store.", ["operation"])
RELAYED = _counter("tokencache_relayed", "Requests relayed to the engine unchanged.", ["status"])
IN_FLIGHT = _sum("tokencache_calls_in_flight", "Model calls in sessions that have begun and not ended.")
UNSAVED = _sum(
    "tokencache_unsaved",
    "Calls and incidents that wait in this process for the store and for no client. They are lost if the process is killed.",
)
_REQUEST_MEMORY = _sum(
    "tokencache_request_memory_bytes",
    "Bytes in memory for requests now: incomplete heads, bodies, fetched media, and replies that are read whole.",
    ["what"],
)
REQUEST_MEMORY = {what: _REQUEST_MEMORY.labels(what) for what in ("head", "body", "media", "reply")}
REQUEST_MEMORY_REFUSED = _counter(
    "tokencache_request_memory_refused", "Requests refused because they would pass --request-memory.", ["what"]
)
OVERHEAD = _histogram(
    "tokencache_added_seconds",
    "Time that the proxy adds: from a request's last byte to its sending (before), and from the reply's end to its last byte (after).",
    ["phase"],
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0),
)
CALL_SECONDS = _histogram(
    "tokencache_call_seconds",
    "Time of model calls in sessions, from a request's last byte to the reply's last byte, waiting for engines included.",
    buckets=(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
BEFORE, AFTER = OVERHEAD.labels("before"), OVERHEAD.labels("after")
ENGINE_LEVEL = _gauge(  # the lowest value of all workers: one worker whose calls are not exact must be visible
    "tokencache_engine_exact", "1 if the engine accepts exact token ids, else 0.", ["engine", "model"], multiprocess_mode="livemin"
)
ENGINE_KV = _newest("tokencache_engine_kv_tokens", "Tokens that the engine's KV cache holds. NaN if that is not known.", ["engine"])
ENGINE_LIVE = _newest(
    "tokencache_engine_live_tokens",
    "Tokens on the engine of calls in flight, and of sessions that paused less than three seconds ago.",
    ["engine"],
)
SESSIONS_FIT = _newest(
    "tokencache_sessions_fit",
    "Sessions that fit into the KV caches: 0.9 of their tokens over the mean footprint of ended sessions. NaN if that is not known.",
)
SESSIONS_WAITING = _sum(
    "tokencache_sessions_waiting", "Sessions that wait to be created because the KV caches have no room (`--admission`)."
)
ENGINE_UP = _gauge(  # the highest value of all workers: one that starts later has not probed yet
    "tokencache_engine_up", "1 if the engine responds and was probed, else 0.", ["engine"], multiprocess_mode="livemax"
)
ENGINE_CALLS = _counter("tokencache_engine_calls", "Model calls in sessions sent to an engine.", ["engine"])
RETRIED_CALLS = _counter("tokencache_repeats", "Calls that retry an earlier call, by how they were served.", ["how"])
QUEUED_CALLS = _counter("tokencache_held", "Times that a call was queued because no engine accepted it.", ["why"])
CONTINUED = _counter("tokencache_continued", "Replies that an engine broke off and that were continued, by how they ended.", ["ended"])
IMAGES = _counter(
    "tokencache_images",
    "Images in exact conversations: sent with their pixels, only named because the engine has them, or missed there and sent again.",
    ["how"],
)
PREFIXES = _counter(
    "tokencache_prefixes",
    "Exact prompts for engines with the plugin: with a prefix by its hash, with all ids, or missed there and sent with all ids.",
    ["how"],
)
PREFIX_BYTES_SAVED = _counter(
    "tokencache_prefix_saved_bytes", "Bytes of ids in requests and answers that the plugin made unnecessary, compared with ids as JSON."
)
BACKGROUND_FAILURES = _counter(
    "tokencache_background_failures", "Steps of background tasks that failed unexpectedly, and were repeated.", ["task"]
)
CLOCK_STEPS = _counter(
    "tokencache_clock_steps",
    "Times that a clock was set by 10 seconds or more while the proxy ran: that of its system (or it was suspended), or that of Redis.",
    ["clock"],
)
WORKER_RESTARTS = _counter("tokencache_worker_restarts", "Workers restarted because one had died.")


@functools.cache
def counter(family: Counter, *labels: str) -> Counter:
    """Return the counter of a family with these labels. Cached, because `Counter.labels` takes several times as long as counting."""
    return family.labels(*labels)


def count_replaced(names: Iterable[str]) -> None:
    """Count sampling parameters that a policy replaced."""
    for name in names:
        REPLACED.labels(name).inc()


def forget(wanted: Mapping[str, str], *families: Gauge) -> None:
    """Forget values with these labels, such as those of an engine, which would raise alerts for good.

    The file of one of several workers keeps the series: it sets them to NaN. Of `ENGINE_LEVEL` the lowest value of all workers counts: it
    is set to infinity, because NaN would hide another worker's 0.
    """
    for family in families:
        known = [sample.labels for metric in family.collect() for sample in metric.samples]
        for labels in [labels for labels in known if wanted.items() <= labels.items()]:
            if _shared_folder():
                family.labels(**labels).set(math.inf if family is ENGINE_LEVEL else math.nan)
            else:
                family.remove(*labels.values())


def _shared_folder() -> str | None:
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR")


def exposition() -> bytes:
    """Return the metrics in Prometheus' text format: of this process, or of all workers if it is one of several."""
    folder = _shared_folder()
    if not folder:
        return generate_latest(REGISTRY)
    all_workers = CollectorRegistry()
    MultiProcessCollector(all_workers, path=folder)  # type: ignore[no-untyped-call]
    return generate_latest(all_workers)

"""Metrics: what `/metrics` shows. Names are the glossary's; every label has few values."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series of creation times beside every counter helps nobody

REGISTRY = CollectorRegistry()

CALLS = Counter("tokencache_calls", "Model calls within sessions, by how they ended.", ["dialect", "outcome"], registry=REGISTRY)
TURNS = Counter("tokencache_turns", "Recorded turns, by how their prompt came about.", ["match", "reason"], registry=REGISTRY)
TOKENS = Counter("tokencache_tokens", "Tokens of recorded turns.", ["part"], registry=REGISTRY)
FORGIVEN = Counter("tokencache_forgiven", "Canonicalisation rules that were needed to recognise a reply.", ["rule"], registry=REGISTRY)
REPLACED = Counter("tokencache_sampling_replaced", "Sampling parameters of a harness that a policy replaced.", ["name"], registry=REGISTRY)
INCIDENTS = Counter("tokencache_incidents", "Incidents noted on sessions.", ["kind"], registry=REGISTRY)
STORE_ERRORS = Counter("tokencache_store_errors", "Operations that the store failed.", ["operation"], registry=REGISTRY)
RELAYED = Counter("tokencache_relayed", "Requests relayed untouched.", ["status"], registry=REGISTRY)
IN_FLIGHT = Gauge("tokencache_calls_in_flight", "Model calls within sessions that have begun and not ended.", registry=REGISTRY)
OVERHEAD = Histogram(
    "tokencache_added_seconds",
    "Time from a request's last byte to its sending, and from the reply's end to its last byte.",
    ["phase"],
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0),
    registry=REGISTRY,
)
ENGINE_LEVEL = Gauge("tokencache_engine_exact", "1 where the engine takes exact ids, else 0.", ["engine", "model"], registry=REGISTRY)
ENGINE_UP = Gauge("tokencache_engine_up", "1 where the engine answers and was probed, else 0.", ["engine"], registry=REGISTRY)
ENGINE_CALLS = Counter("tokencache_engine_calls", "Model calls within sessions that were sent to an engine.", ["engine"], registry=REGISTRY)
HELD = Counter("tokencache_held", "Times that a call within a session was held because no engine took it.", ["why"], registry=REGISTRY)

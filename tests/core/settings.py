"""Hypothesis profiles: the same examples every time, few enough to be run at every change."""

from hypothesis import HealthCheck, settings

_COMMON = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
MANY = settings(max_examples=300, **_COMMON)
SOME = settings(max_examples=100, **_COMMON)
FEW = settings(max_examples=60, **_COMMON)

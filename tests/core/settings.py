"""How many examples hypothesis tries: few enough for a run at every change. All else is in `tests/support/profiles.py`."""

from hypothesis import HealthCheck, settings

from tests.support.profiles import examples

_COMMON = {"suppress_health_check": list(HealthCheck)}
MANY = settings(max_examples=examples(300), **_COMMON)
SOME = settings(max_examples=examples(100), **_COMMON)
FEW = settings(max_examples=examples(60), **_COMMON)

"""The settings of hypothesis for the whole suite: the same examples in every run, however slow the machine is."""

import os

from hypothesis import HealthCheck, settings

from tests.support.whole import WHOLE


def load() -> None:
    """Make them the default. `tests/conftest.py` calls this once it is known which tests run, before any is imported."""
    settings.register_profile(
        "suite",
        max_examples=examples(100),
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("suite")


def examples(whole: int) -> int:
    """How many examples a test tries: a third of `whole`, unless a run has `--whole`."""
    return whole if os.environ.get(WHOLE) else whole // 3

"""The settings of hypothesis for the whole suite: the same examples in every run, however slow the machine is."""

from hypothesis import HealthCheck, settings


def load() -> None:
    """Make them the default. `tests/conftest.py` calls this before any test is imported."""
    settings.register_profile(
        "suite", derandomize=True, database=None, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("suite")

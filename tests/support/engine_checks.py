"""Keeps the checks of engines out of tests that are not about them."""

import pytest

from tests.support.waiting import PATIENCE
from tokencache.engine import health


@pytest.fixture(autouse=True)
def no_engine_checks(monkeypatch):
    """An engine is checked once. A later check would probe it at any time, between the requests that a test counts.

    On a busy machine an engine answers late, and is there nevertheless. Tests of the checks set both values themselves.
    """
    monkeypatch.setattr(health, "CHECK_EVERY", 3600.0)
    monkeypatch.setattr(health, "TIMEOUT_SECONDS", PATIENCE)

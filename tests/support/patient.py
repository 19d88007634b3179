"""Keeps a proxy under test from acting by the clock: a test that is about a limit sets it itself."""

import pytest

from tests.support.waiting import PATIENCE
from tokencache.api import routes
from tokencache.api.viewer import tokens
from tokencache.engine import health, upstream
from tokencache.proxy import continuation, dispatch, policy_version
from tokencache.server import drain


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine an answer is late, and there nevertheless.

    An engine is checked once: a later check could probe it between two requests that a test counts.
    """
    monkeypatch.setattr(health, "CHECK_EVERY", 3600.0)
    limits = [
        (health, "TIMEOUT_SECONDS"),
        (upstream, "CONNECT_SECONDS"),
        (routes, "DRIFT_TIMEOUT"),
        (tokens, "_TIMEOUT"),
        (dispatch, "_PLACES_SECONDS"),
        (continuation, "WORDS_SECONDS"),
        (policy_version, "_SECONDS"),
        (drain, "CANCEL_SECONDS"),
    ]
    for module, name in limits:
        monkeypatch.setattr(module, name, PATIENCE)

"""Proxies in these tests act by what happens, not by the clock."""

from tests.support.patient import patient  # noqa: F401 - a fixture

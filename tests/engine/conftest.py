"""Tests of this folder count what engines get."""

from tests.support.engine_checks import no_engine_checks  # noqa: F401 - a fixture

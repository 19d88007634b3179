"""One rig per test: engine, proxy, client."""

import pytest

from tests.proxy.kit import proxied
from tests.support.patient import patient  # noqa: F401 - a fixture


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Escape lone surrogates in captured logs: a parallel worker sends its reports as UTF-8."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report

import pytest

from tests.adapters.kit import Machine, listing
from tests.support.patient import patient  # noqa: F401 - a fixture


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def proxy():
    """The URL of a proxy that serves one model."""
    with listing({"id": "Org/one", "max_model_len": 40960}) as (url, _):
        yield url

"""What a change needs: the whole of the tests that it can break."""

from pathlib import Path

import pytest

import tokencache
from tests.support.changed import EVERYTHING, RESTS_ON, folders

REPOSITORY = Path(__file__).parents[2]
BELOW_EVERYTHING = {"core", "store", "testing"}


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        (["docs/concepts.md", "README.md"], ["tests/docs"]),
        (["tokencache/demo/episodes.py"], ["tests/demo"]),
        (["tokencache/proxy/call.py", "tests/api/test_queue.py"], ["tests/api", "tests/proxy", "tests/server", "tests/system"]),
        (["tests/system/faults/chaos.py", "tests/system/corpus/make.py"], ["tests/system/corpus", "tests/system/faults"]),
        (["tokencache/core/match.py", "docs/concepts.md"], [EVERYTHING]),
        (["tokencache/store/memory.py"], [EVERYTHING]),
        (["tokencache/config.py"], [EVERYTHING]),
        (["requirements.lock"], [EVERYTHING]),
        (["tests/support/ports.py"], [EVERYTHING]),
        (["tests/conftest.py"], [EVERYTHING]),
        ([".ci/run"], [EVERYTHING]),
        ([], []),
    ],
)
def test_folders(paths, wanted):
    assert folders(paths) == wanted


def test_each_package_is_listed_or_below_everything():
    packages = {path.parent.name for path in Path(tokencache.__file__).parent.glob("*/__init__.py")}
    assert packages == RESTS_ON.keys() | BELOW_EVERYTHING


def test_each_folder_exists():
    assert [folder for listed in RESTS_ON.values() for folder in listed if not (REPOSITORY / folder).is_dir()] == []

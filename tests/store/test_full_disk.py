"""The file store on a disk that is really full: sessions are finished and deleted, and then it serves again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.material import require

FULL = "file: commit: database or disk is full: "
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def may_mount():
    return shutil.which("unshare") and not subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the script saw on disks that only it can see."""
    require("mount namespaces", may_mount())
    script = [sys.executable, "-m", "tests.store.full_disk", str(tmp_path_factory.mktemp("disks"))]
    done = subprocess.run([*NAMESPACE, *script], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def test_sessions_fill_the_disk_again_and_again(seen):
    for found in seen["by_sessions"]:
        assert found["turns"] > 70, "space is used again"
        assert found["why"].startswith(FULL)
        assert found["ready"] == found["why"], "readiness follows the last write"
        assert "is nearly full: sessions take " in found["new"]
        assert (found["finished"], found["settled"], found["deleted"], found["ready after"]) == (True, "", True, "")


def test_another_program_fills_the_disk_to_its_last_byte(seen):
    found = seen["by_others"]
    assert found["free"] == 0
    assert found["why"].startswith(FULL + "0 bytes are free on the disk of ")
    assert found["ready"] == found["why"]
    assert found["finished"], "also after a restart"
    assert all(found["deleted"])
    assert (found["ready after"], found["new"], found["kept"]) == ("", "", ["new", "s39"])


def test_what_a_trainer_sees(seen):
    found = seen["by_calls"]
    assert (found["ready"]["ready"], found["ready"]["store"].startswith(FULL)) == (False, True)
    status, body = found["new"]
    assert (status, body["error"]["type"]) == (503, "store_full")
    assert (found["POST"], found["DELETE"], found["ready after"], found["new after"]) == (200, 200, "ok", 200)

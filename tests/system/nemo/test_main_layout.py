"""The names of Gym's capture package: those of 0.7.0, and those of Gym's main branch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.material import require_package
from tests.system.nemo.main_layout import MAIN, RELEASED, copy_with_main_names

IMPORTED = "from tokencache.integrations.nemo_gym.gym_package import gym; print(gym.__name__)"


def run(path, *arguments):
    """Runs Python with this folder before all others."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), *sys.path])}
    return subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, check=False)


def package(folder, name, code=""):
    for part in (place := folder / name.replace(".", "/"), *place.parents):
        if part == folder:
            break
        part.mkdir(parents=True, exist_ok=True)
        (part / "__init__.py").touch()
    (place / "__init__.py").write_text(code)


@pytest.mark.parametrize(("names", "imported"), [([RELEASED], RELEASED), ([MAIN], MAIN), ([RELEASED, MAIN], MAIN)])
def test_either_name_is_imported_and_that_of_main_has_priority(tmp_path, names, imported):
    for name in names:
        package(tmp_path, name)
    assert run(tmp_path, "-c", IMPORTED).stdout.strip() == imported


def test_a_requirement_of_gym_that_is_missing_is_named(tmp_path):
    package(tmp_path, MAIN, "import absent_requirement")
    assert "No module named 'absent_requirement'" in run(tmp_path, "-c", IMPORTED).stderr.splitlines()[-1]


def test_sink_source_resolver_and_proofs_work_with_the_names_of_main(tmp_path):
    """Their tests, in a process in which Gym has no other names."""
    gym = require_package("nemo_gym", "nemo_gym")
    copied = copy_with_main_names(Path(gym.__file__ or "").parents[1], tmp_path / "main")
    assert run(copied, "-c", IMPORTED).stdout.strip() == MAIN
    tests = [str(Path(__file__).with_name(name)) for name in ("test_capture.py", "test_proving.py")]
    ended = run(copied, "-m", "pytest", "-o", "addopts=-q -rA --strict-markers --strict-config", "-p", "no:cacheprovider", *tests)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    checked = {word for ids in re.findall(r"PASSED \S+test_gym_s_own_checks\[(\S+)\]", ended.stdout) for word in ids.split("-")}
    assert checked == {"memory", "file", "redis", "plain", "proving"}

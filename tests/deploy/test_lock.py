"""The dependencies of continuous integration are pinned, by hash, and checked for known vulnerabilities."""

import importlib.util
import json
import re
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.deploy import reading

LOCK = reading.ROOT / "requirements.lock"
PINS = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", LOCK.read_text(), re.MULTILINE))


def load_audit():
    spec = importlib.util.spec_from_file_location("audit", reading.ROOT / ".ci" / "audit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


AUDITOR = """
import json, sys
asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
service, lines = asked["--vulnerability-service"], open(asked["--requirement"]).read().splitlines()
knows, ill, absent = json.loads(%r)
if service not in knows:
    print("Traceback: no route to host" if service == "osv" else json.dumps({"dependencies": [{"name": "jinja2", "skip_reason": "404"}]}))
    sys.exit(0)
found = []
for line in lines:
    name, _, version = line.partition("==")
    if name in absent:
        found.append({"name": name, "skip_reason": "not found"})
    else:
        bad = name in ill or version == "2.4.1"
        found.append({"name": name, "version": version, "vulns": [{"id": "PYSEC-1", "fix_versions": ["9"]}] if bad else []})
print(json.dumps({"dependencies": found, "fixes": []}))
"""


@pytest.fixture
def audited(tmp_path, capsys):
    """Audits two packages with a stand-in for pip-audit: the services that know anything, what is vulnerable, what is not found."""
    lock = tmp_path / "requirements.lock"
    lock.write_text("alpha==1\nbeta==2\n")

    def audit(knows, ill=(), absent=()):
        stand_in = [sys.executable, "-c", AUDITOR % json.dumps([list(knows), list(ill), list(absent)])]
        return load_audit().main(lock, stand_in), capsys.readouterr().out

    return audit


@pytest.mark.parametrize("service", ["pypi", "osv"])
def test_a_vulnerability_fails_the_build(audited, service):
    assert audited([service]) == (0, f"2 packages looked up at {service}: 0 vulnerable, 0 unknown\n")
    code, output = audited([service], ill=["beta"])
    assert code == 1
    assert "VULNERABLE: beta 2: PYSEC-1, fixed in 9" in output


def test_what_cannot_be_looked_up_fails_it_too(audited):
    code, output = audited(["pypi"], absent=["alpha"])
    assert code == 1
    assert "could not be looked up: alpha" in output


def test_a_service_without_data_is_reported(audited):
    code, output = audited([], ill=["alpha"])
    assert code == 0
    assert output.startswith("NOT AUDITED")


def test_everything_that_the_package_and_its_tools_need_is_pinned():
    project = tomllib.loads((reading.ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    for wanted in map(Requirement, needed):
        if wanted.name != project["name"]:
            pin = PINS.get(wanted.name.lower())
            assert pin is not None and pin in wanted.specifier, f"{wanted}: make lock"  # noqa: PT018


def test_each_pin_has_its_hashes():
    entries = re.split(r"\n(?=[a-z])", LOCK.read_text())
    assert len(entries) == len(PINS) > 50
    assert all("--hash=sha256:" in entry for entry in entries)

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
OUR_OWN = {"tokencache", "tokencache-vllm"}
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
if "stops" in knows and lines[0] != "jinja2==2.4.1":
    sys.exit("no route to host")
if service not in knows and "stops" not in knows:
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
    """Audits two packages with a stand-in for pip-audit: the services that know anything, what is vulnerable, what is not found.

    Returns the exit code and what was printed. The last line is the result, which a file has, too.
    """
    lock, result = tmp_path / "requirements.lock", tmp_path / "result.txt"
    lock.write_text("alpha==1\nbeta==2\n")

    def audit(knows, ill=(), absent=()):
        stand_in = [sys.executable, "-c", AUDITOR % json.dumps([list(knows), list(ill), list(absent)])]
        code = load_audit().main([str(lock), "--result", str(result)], stand_in)
        printed = capsys.readouterr().out.splitlines()
        assert result.read_text() == f"{printed[-1]}\n"
        return code, printed

    return audit


@pytest.mark.parametrize("service", ["pypi", "osv"])
def test_a_vulnerability_fails_the_build(audited, service):
    assert audited([service]) == (0, [f"audit: audited 2 packages at {service}, 0 vulnerable"])
    assert audited([service], ill=["beta"]) == (
        1,
        ["VULNERABLE: beta 2: PYSEC-1, fixed in 9", f"audit: audited 2 packages at {service}, 1 vulnerable"],
    )


def test_what_cannot_be_looked_up_fails_it_too(audited):
    code, printed = audited(["pypi"], absent=["alpha"])
    assert code == 1
    assert printed == [
        "could not be looked up: alpha: not found",
        "audit: audited 1 packages at pypi, 0 vulnerable, 1 could not be looked up",
    ]


def test_a_service_without_data_audits_nothing_and_the_result_says_so(audited):
    code, (result,) = audited([], ill=["alpha"])
    assert code == 0
    assert result.startswith("audit: NOT audited: no service with vulnerability data")


def test_a_service_that_stops_answering_fails_the_build(audited):
    code, (result,) = audited(["stops"])
    assert code == 1
    assert result.startswith("audit: NOT audited: pypi has data, but returned none")


def test_everything_that_the_package_and_its_tools_need_is_pinned():
    projects = [tomllib.loads((reading.ROOT / folder / "pyproject.toml").read_text())["project"] for folder in (".", "vllm_plugin")]
    # Trackers are tested in an environment of their own (`make integrations`).
    extras = [needs for name, needs in projects[0]["optional-dependencies"].items() if name not in {"wandb", "mlflow", "tensorboard"}]
    needed = [one for project in projects for one in project["dependencies"]] + [one for extra in extras for one in extra]
    for wanted in map(Requirement, needed):
        if wanted.name not in OUR_OWN:
            pin = PINS.get(wanted.name.lower())
            assert pin is not None and pin in wanted.specifier, f"{wanted}: make lock"  # noqa: PT018


def test_each_pin_has_its_hashes():
    entries = re.split(r"\n(?=[a-z])", LOCK.read_text())
    assert len(entries) == len(PINS) > 50
    assert all("--hash=sha256:" in entry for entry in entries)

"""Alerts fire when they should, as Prometheus itself evaluates them; and the page's one-line command creates its rule file."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy import reading
from tests.support.material import require
from tests.support.waiting import PATIENCE

CASES = Path(__file__).with_name("alerts.test.yaml")


@pytest.fixture
def rule_file(tmp_path):
    """The rule file that the kustomization's one-line command creates."""
    kustomization = (reading.MONITORING / "kustomization.yaml").read_text()
    line = re.search(r"^#\s+(sed .*) > tokencache-rules\.yml$", kustomization, re.MULTILINE)[1]
    made = subprocess.run(line, shell=True, cwd=reading.ROOT, check=True, capture_output=True, timeout=PATIENCE)  # noqa: S602 - to be pasted
    (tmp_path / "rules.yml").write_bytes(made.stdout)
    return tmp_path / "rules.yml"


def test_the_rule_file_is_the_specification(rule_file):
    (rule,) = [thing for thing in reading.manifests("monitoring") if thing["kind"] == "PrometheusRule"]
    assert yaml.safe_load(rule_file.read_text()) == rule["spec"]


def test_every_alert_has_a_test():
    tried = {case["alertname"] for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]}
    assert tried == {rule["alert"] for rule in reading.rules() if "alert" in rule}


def test_alerts_fire(rule_file):
    require("promtool", shutil.which("promtool"))
    shutil.copy(CASES, rule_file.parent)
    done = subprocess.run(
        ["promtool", "test", "rules", CASES.name], cwd=rule_file.parent, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

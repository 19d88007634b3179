"""Reads the deployment files: compose file, image, manifests, rules and dashboard."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import yaml

from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = "chart"
MONITORING = DEPLOY / "monitoring"
KEY = "an-admin-key"


def compose(*more: Path, **environment: str) -> dict[str, Any]:
    """The compose file as `docker compose` reads it, with `more` over it; `environment` is the shell's."""
    shell = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment}
    program = Path(sys.executable).with_name("docker-compose")
    files = [word for file in (ROOT / "docker-compose.yml", *more) for word in ("--file", file)]
    command = [program, *files, "--profile", "*", "--env-file", os.devnull, "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, env=shell, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    return json.loads(done.stdout)


@cache
def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions: word and arguments, continuation lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, arguments) for word, _, arguments in (line.partition(" ") for line in whole.splitlines() if line)]


def final_stage() -> list[tuple[str, str]]:
    """The instructions that make the image itself."""
    begins = max(n for n, (word, _) in enumerate(instructions()) if word == "FROM")
    return instructions()[begins:]


def image_environment() -> dict[str, str]:
    """The variables that the image sets."""
    entries = [pair for word, arguments in final_stage() if word == "ENV" for pair in shlex.split(arguments)]
    return dict(pair.split("=", 1) for pair in entries)


def image_list(word: str) -> list[str]:
    """An instruction's JSON list, such as ENTRYPOINT's."""
    return json.loads(next(arguments for instruction, arguments in final_stage() if instruction == word))


def chart(*options: str) -> list[dict[str, Any]]:
    """The objects that Helm makes of the chart; options such as `--set replicas=1`.

    Raises:
        ValueError: Helm refuses the values.
    """
    command = [Path(sys.executable).with_name("helm"), "template", "tokencache", DEPLOY / CHART, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    return list(yaml.safe_load_all(done.stdout))


@cache
def manifests(folder: str) -> list[dict[str, Any]]:
    """The objects of the chart, or those that a kustomization lists as its resources."""
    if folder == CHART:
        return chart()
    listed = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())["resources"]
    return [thing for name in listed for thing in yaml.safe_load_all((DEPLOY / folder / name).read_text())]


def pods(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and specification of each pod that the manifests create."""
    for thing in manifests(folder):
        if "template" in thing.get("spec", {}):
            yield thing["metadata"]["name"], thing["spec"]["template"]["spec"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def rules() -> list[dict[str, Any]]:
    """All rules, recording and alerting."""
    (rule,) = [thing for thing in manifests("monitoring") if thing["kind"] == "PrometheusRule"]
    return [one for group in rule["spec"]["groups"] for one in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return json.loads((MONITORING / "dashboard.json").read_text())["panels"]


def dashboard_queries() -> list[str]:
    """The dashboard's queries, with values for Grafana's own variables."""
    entries = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    return [query.replace("$__rate_interval", "1m").replace("$job", ".*") for query in entries]


def selected(query: str) -> list[tuple[str, dict[str, str]]]:
    """Parses a query; returns what it selects: names of series, each with its label matchers."""
    found = []

    def look(part: promql_parser.Expr) -> None:
        if isinstance(part, promql_parser.VectorSelector):
            found.append((part.name, {matcher.name: matcher.value for matcher in part.matchers.matchers}))

    promql_parser.walk(promql_parser.parse(query), pre_visit=look)
    return found

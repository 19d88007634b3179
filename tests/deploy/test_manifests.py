"""Compose file, image and manifests: what must hold in each of them, and between them and the proxy."""

import itertools
import re
import shutil
import subprocess

import pytest
import yaml

from tests.deploy import reading
from tests.support.material import require
from tests.support.waiting import PATIENCE
from tokencache.config import Settings

PREFIX = "TOKENCACHE_"
WRITING = 15
"""Seconds after the drain timeout: calls that were cut off are recorded."""
FOLDERS = (reading.CHART, "kubernetes/sidecar")
PODS = [pytest.param(name, pod, id=name) for folder in FOLDERS for name, pod in reading.pods(folder)]
OURS = [
    (name, pod, one)
    for folder in FOLDERS
    for name, pod in reading.pods(folder)
    for one in reading.containers(pod)
    if one["image"].partition(":")[0] == "tokencache"
]


def settings_of(environment, monkeypatch):
    """The settings that a container's environment results in."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    unknown = {name for name in environment if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() not in Settings.model_fields}
    assert not unknown
    return Settings()


def environment_of(container):
    """A container's environment; secrets are `secret`, and `$(NAME)` is a variable defined earlier."""
    declared = dict(reading.image_environment())
    for source in container.get("envFrom", ()):
        (options,) = [thing for thing in reading.manifests(reading.CHART) if thing["kind"] == "ConfigMap"]
        assert source == {"configMapRef": {"name": options["metadata"]["name"]}}
        declared |= options["data"]
    for one in container.get("env", ()):
        value = one.get("value", "secret")
        declared[one["name"]] = re.sub(r"\$\((\w+)\)", lambda found: declared[found[1]], value)
    return {name: value for name, value in declared.items() if name.startswith(PREFIX)}


@pytest.mark.parametrize(("name", "pod", "container"), OURS, ids=[name for name, *_ in OURS])
def test_kubernetes_sets_existing_settings(name, pod, container, monkeypatch):
    settings = settings_of(environment_of(container), monkeypatch)
    assert container["args"] == reading.image_list("CMD")
    assert settings.admin_key == "secret"
    assert settings.store == "redis://:secret@tokencache-redis:6379/0"
    assert settings.prefix_memory < 0.5 * size(container["resources"]["limits"]["memory"])


@pytest.mark.parametrize(("name", "pod"), PODS)
def test_pods_are_hardened(name, pod):
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    for container in reading.containers(pod):
        context = container["securityContext"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context.get("readOnlyRootFilesystem") or container["name"] == "harness"
        assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize(("name", "pod"), PODS)
def test_service_links_do_not_overwrite_the_port(name, pod):
    """With a Service called `tokencache`, Kubernetes would set `TOKENCACHE_PORT=tcp://10.0.0.7:8100`, which is not a port."""
    assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize(("name", "pod", "container"), OURS, ids=[name for name, *_ in OURS])
def test_a_pod_is_given_time_to_drain(name, pod, container, monkeypatch):
    drain = settings_of(environment_of(container), monkeypatch).drain
    pause = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert pod["terminationGracePeriodSeconds"] >= int(pause[1]) + drain + WRITING


@pytest.mark.parametrize(("name", "pod", "container"), OURS, ids=[name for name, *_ in OURS])
def test_a_live_pod_is_not_killed_because_of_an_engine(name, pod, container):
    """What all replicas share is part of readiness only at the start."""
    asked = {probe: container[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe") if probe in container}
    paths = {probe: action["httpGet"]["path"] if "httpGet" in action else action["exec"]["command"][1] for probe, action in asked.items()}
    assert paths.pop("startupProbe") == "/readyz"
    assert set(paths.values()) == {"/healthz"}
    for action in asked.values():
        if "exec" in action:
            assert action["exec"]["command"][0] == "tokencache-health"
            assert environment_of(container)["TOKENCACHE_HOST"] == "127.0.0.1"  # the kubelet is on another host


def test_selectors_match_their_targets():
    things = [thing for thing in reading.manifests(reading.CHART) if "spec" in thing]
    labels = {thing["metadata"]["name"]: thing["spec"]["template"]["metadata"]["labels"] for thing in things if "template" in thing["spec"]}
    for thing in things:
        name, spec = thing["metadata"]["name"], thing["spec"]
        selector = spec["selector"].get("matchLabels", spec["selector"]) if "selector" in spec else spec["podSelector"]["matchLabels"]
        if name in labels:
            assert selector.items() <= labels[name].items()
    (monitor,) = [thing for thing in reading.manifests("monitoring") if thing["kind"] == "ServiceMonitor"]
    (service,) = [thing for thing in things if thing["kind"] == "Service" and thing["metadata"]["name"] == "tokencache"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_roles_that_the_policies_admit_exist():
    policies = [thing for thing in reading.manifests(reading.CHART) if thing["kind"] == "NetworkPolicy"]
    assert len(policies) == 3
    words = re.search(r"`tokencache-role`: ([a-z, ]+)", (reading.DEPLOY / "chart/templates/network.yaml").read_text())
    named = set(words[1].split(", "))
    used = {value for role in yaml_values(policies, "matchExpressions") for value in role[0]["values"]}
    worn = {
        thing["spec"]["template"]["metadata"]["labels"].get("tokencache-role")
        for folder in FOLDERS
        for thing in reading.manifests(folder)
        if "template" in thing.get("spec", {})
    } - {None}
    assert used == named
    assert worn == {"proxy", "sidecar"}


def yaml_values(thing, name):
    """All values of a member, however deep."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            if key == name:
                yield value
            yield from yaml_values(value, name)
    elif isinstance(thing, list):
        for value in thing:
            yield from yaml_values(value, name)


def test_kustomize_builds_them():
    require("kubectl", shutil.which("kubectl"))
    for folder in ("kubernetes/sidecar", "monitoring"):
        built = subprocess.run(
            ["kubectl", "kustomize", reading.DEPLOY / folder], check=True, capture_output=True, text=True, timeout=PATIENCE
        )
        assert {thing["kind"] for thing in reading.manifests(folder)} <= {thing["kind"] for thing in yaml.safe_load_all(built.stdout)}


@pytest.mark.parametrize("scheme", ["rediss", "valkey", "valkeys+cluster"])
def test_another_redis_replaces_the_charts_own(scheme):
    url = f"{scheme}://:$(REDIS_PASSWORD)@elsewhere:6379/0"
    things = reading.chart("--set", f"redis.url={url}")
    assert not [thing for thing in things if "redis" in thing["metadata"]["name"]]
    (pod,) = [thing["spec"]["template"]["spec"] for thing in things if thing["kind"] == "Deployment"]
    (store,) = [one["value"] for one in pod["containers"][0]["env"] if one["name"] == "TOKENCACHE_STORE"]
    assert store == url


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("replica=3", "replica"),
        ("replicas=0", "replicas"),
        ("redis.maxmemory=8", "maxmemory"),
        ("redis.url=memory:", "url"),
        ("options.UPSTREAM=http://engine", "UPSTREAM"),
    ],
)
def test_the_chart_refuses_a_wrong_value_by_name(value, named):
    with pytest.raises(ValueError, match=named):
        reading.chart("--set", value)


def test_redis_keeps_its_data():
    (pod,) = [pod for name, pod in reading.pods(reading.CHART) if name == "tokencache-redis"]
    (redis,) = pod["containers"]
    declared = [redis["args"], reading.compose(TOKENCACHE_ADMIN_KEY=reading.KEY)["services"]["redis"]["command"]]
    for arguments in declared:
        options = dict(itertools.pairwise(arguments[1:]))
        assert options["--maxmemory-policy"] == "noeviction"
        assert options["--appendonly"] == "yes"
        assert options["--maxmemory"]
    assert size(redis["resources"]["limits"]["memory"]) >= 1.5 * size(dict(itertools.pairwise(redis["args"]))["--maxmemory"])


def size(text):
    """Bytes: Redis's `8gb`, Kubernetes's `12Gi`; all are powers of two."""
    number, unit = re.fullmatch(r"(\d+)([gm])[bi]", text.lower()).groups()
    return int(number) * (2**30 if unit == "g" else 2**20)


@pytest.mark.parametrize("shell", [{}, {"TOKENCACHE_ADMIN_KEY": ""}])
def test_compose_refuses_an_empty_admin_key(shell):
    with pytest.raises(ValueError, match="TOKENCACHE_ADMIN_KEY is missing a value"):
        reading.compose(**shell)


def test_compose_sets_existing_settings(monkeypatch):
    shell = {
        "TOKENCACHE_ADMIN_KEY": reading.KEY,
        "TOKENCACHE_SAMPLING": '{"temperature": 1}',
        "TOKENCACHE_MODEL_ALIASES": '{"claude-*": "m"}',
        "TOKENCACHE_LOG_LEVEL": "debug",
        "TOKENCACHE_UPSTREAM_KEY": "k",
        "TOKENCACHE_WORKERS": "2",
    }
    service = reading.compose(**shell)["services"]["tokencache"]
    settings = settings_of({**reading.image_environment(), **service["environment"]}, monkeypatch)
    assert (settings.admin_key, settings.sampling, settings.log_level) == (reading.KEY, {"temperature": 1}, "debug")
    assert settings.workers == 2
    (port,) = service["ports"]
    assert (port["host_ip"], port["target"]) == ("127.0.0.1", settings.port)


def test_compose_has_an_engine_for_each_profile():
    services = reading.compose(TOKENCACHE_ADMIN_KEY=reading.KEY)["services"]
    engines = {tuple(service["profiles"]): service for service in services.values() if "profiles" in service}
    assert set(engines) == {("cpu",), ("gpu",)}
    host = services["tokencache"]["environment"]["TOKENCACHE_UPSTREAM"]
    for service in engines.values():
        assert host == f"http://{service['networks']['engine']['aliases'][0]}:8000"
        assert service["healthcheck"]["test"][0] == "CMD"
        assert "ports" not in service
        assert "--logprobs-mode=processed_logprobs" in service["command"]  # otherwise the proxy warns at every start
    assert engines["gpu",]["command"] == engines["cpu",]["command"]


def test_dynamo_has_the_options_of_exact_prompts_in_compose_and_kubernetes():
    services = reading.compose(reading.DEPLOY / "dynamo/compose.yaml", TOKENCACHE_ADMIN_KEY=reading.KEY)["services"]
    frontend, worker = services["frontend"], services["worker-0"]
    (alias,) = frontend["networks"]["engine"]["aliases"]
    assert services["tokencache"]["environment"]["TOKENCACHE_UPSTREAM"] == f"http://{alias}:8000"
    graph = yaml.safe_load((reading.DEPLOY / "dynamo/graph.yaml").read_text())
    asked = {}
    for part in graph["spec"]["components"]:
        (asked[part["type"]],) = part["podTemplate"]["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in asked["frontend"]["env"]}
    options = dict(word.removeprefix("--").split("=") for word in frontend["command"] if "=" in word)
    for name in ("router-mode", "router-session-affinity-ttl-secs", "migration-limit"):
        assert variables[f"DYN_{name.upper().replace('-', '_')}"] == options[name]
    wanted = {word.partition("=")[0] for word in asked["worker"]["args"]}
    assert wanted <= {word.partition("=")[0] for word in worker["command"]}
    assert "--enable-rl" in wanted


def test_compose_gives_a_proxy_time_to_drain(monkeypatch):
    service = reading.compose(TOKENCACHE_ADMIN_KEY=reading.KEY)["services"]["tokencache"]
    declared = {name: value for name, value in service["environment"].items() if value is not None}
    drain = settings_of({**reading.image_environment(), **declared}, monkeypatch).drain
    period = service["stop_grace_period"]
    minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(\d+)s", period).groups(default="0")
    assert 60 * int(minutes) + int(seconds) >= drain + WRITING


def test_containers_other_than_the_engine_are_hardened():
    for name in ("redis", "tokencache"):
        service = reading.compose(TOKENCACHE_ADMIN_KEY=reading.KEY)["services"][name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]


def test_the_image_runs_as_nobody_and_contains_no_tools():
    declared = dict(reading.final_stage())
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", declared["USER"])
    assert "pip uninstall" in declared["RUN"]
    assert {arguments.split()[0] for word, arguments in reading.final_stage() if word == "COPY"} == {"--from=build", "--chmod=755"}
    assert declared["EXPOSE"] == reading.image_environment()["TOKENCACHE_PORT"]


def test_what_the_image_is_built_from_is_not_ignored():
    kept = {line[1:] for line in (reading.ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [arguments.split() for word, arguments in reading.instructions() if word == "COPY" and "--from" not in arguments]
    assert {source for words in copied for source in words[:-1] if not source.startswith("--")} == kept
    for source in kept:
        assert (reading.ROOT / source).exists()

"""What an adapter becomes for one session: command line, environment, files."""

import json
import tomllib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters.kit import SHIPPED
from tokencache.adapters.files import render
from tokencache.adapters.launch import prepare
from tokencache.adapters.load import AdapterError
from tokencache.errors import HarnessError

PROXY, SESSION, KEY, MODEL = "http://proxy.example:8100", "r:1@a+b", "tck-4f", "Org/Model-1"


def base(name):
    return f"{PROXY}/s/{SESSION}/h/{name}"


def prepared(name, directory, **changed):
    return prepare(
        SHIPPED[name], **{"proxy_url": PROXY, "session": SESSION, "key": KEY, "model": MODEL, "config_dir": directory, **changed}
    )


def openai(name):
    return {"OPENAI_BASE_URL": base(name) + "/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}


ENV = {
    "agno": openai("agno"),
    "anthropic": {"ANTHROPIC_BASE_URL": base("anthropic"), "ANTHROPIC_AUTH_TOKEN": KEY, "ANTHROPIC_MODEL": MODEL},
    "claude-code": {
        "ANTHROPIC_BASE_URL": base("claude-code"),
        "ANTHROPIC_AUTH_TOKEN": KEY,
        **{f"ANTHROPIC_{role}MODEL": MODEL for role in ("", "DEFAULT_OPUS_", "DEFAULT_SONNET_", "DEFAULT_HAIKU_", "SMALL_FAST_")},
        "CLAUDE_CONFIG_DIR": "{dir}",
        "DISABLE_TELEMETRY": "1",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "40960",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "10240",
    },
    "codex": {"CODEX_HOME": "{dir}", "TOKENCACHE_API_KEY": KEY},
    "gemini-cli": {"GOOGLE_GEMINI_BASE_URL": base("gemini-cli"), "GEMINI_API_KEY": KEY, "GEMINI_MODEL": MODEL, "GEMINI_CLI_HOME": "{dir}"},
    "google-adk": {
        **openai("google-adk"),
        "GOOGLE_GEMINI_BASE_URL": base("google-adk"),
        "GEMINI_API_KEY": KEY,
        "GEMINI_MODEL": MODEL,
    },
    "hermes": {"HERMES_HOME": "{dir}"},
    "kimi-code": {"KIMI_CODE_HOME": "{dir}"},
    "langgraph": openai("langgraph"),
    "mini-swe-agent": {
        "MSWEA_MODEL_NAME": f"hosted_vllm/{MODEL}",
        "HOSTED_VLLM_API_BASE": base("mini-swe-agent") + "/v1",
        "HOSTED_VLLM_API_KEY": KEY,
        "MSWEA_GLOBAL_CONFIG_DIR": "{dir}",
    },
    "openai": openai("openai"),
    "openai-agents": openai("openai-agents"),
    "cline": {},
    "continue": {"CONTINUE_GLOBAL_DIR": "{dir}", "CONTINUE_METRICS_ENABLED": "0"},
    "copilot": {
        "COPILOT_HOME": "{dir}",
        "COPILOT_PROVIDER_BASE_URL": base("copilot") + "/v1",
        "COPILOT_PROVIDER_API_KEY": KEY,
        "COPILOT_MODEL": MODEL,
        "COPILOT_OFFLINE": "true",
    },
    "droid": {"FACTORY_HOME_OVERRIDE": "{dir}", "FACTORY_AIRGAP_ENABLED": "true"},
    "kilo": {"XDG_CONFIG_HOME": "{dir}/config", "XDG_DATA_HOME": "{dir}/data", "TOKENCACHE_API_KEY": KEY, "KILO_TELEMETRY_LEVEL": "off"},
    "openclaw": {"OPENCLAW_STATE_DIR": "{dir}", "OPENCLAW_CONFIG_PATH": "{dir}/openclaw.json", "OPENCLAW_NO_AUTO_UPDATE": "1"},
    "opencode": {"XDG_CONFIG_HOME": "{dir}/config", "XDG_DATA_HOME": "{dir}/data", "TOKENCACHE_API_KEY": KEY},
    "openhands": {"LLM_MODEL": f"hosted_vllm/{MODEL}", "LLM_BASE_URL": base("openhands") + "/v1", "LLM_API_KEY": KEY},
    "pi": {"PI_CODING_AGENT_DIR": "{dir}"},
    "pydantic-ai": openai("pydantic-ai"),
    "qwen-code": {**openai("qwen-code"), "QWEN_HOME": "{dir}"},
    "smolagents": openai("smolagents"),
    "crewai": openai("crewai"),
    "strands": openai("strands"),
    "terminus-2": {"LITELLM_MODEL": f"hosted_vllm/{MODEL}", "HOSTED_VLLM_API_BASE": base("terminus-2") + "/v1", "HOSTED_VLLM_API_KEY": KEY},
}
PROGRAMS = {
    "claude-code": ("claude",),
    "cline": ("cline", "--config", "{dir}", "--data-dir", "{dir}/data"),
    "codex": ("codex",),
    "continue": ("cn", "--config", "{dir}/config.yaml"),
    "copilot": ("copilot",),
    "droid": ("droid",),
    "gemini-cli": ("gemini",),
    "hermes": ("hermes",),
    "kilo": ("kilo",),
    "kimi-code": ("kimi",),
    "mini-swe-agent": ("mini",),
    "openclaw": ("openclaw",),
    "opencode": ("opencode",),
    "pi": ("pi", "--provider", "tokencache", "--model", MODEL),
    "qwen-code": ("qwen",),
}
FILES = {
    "claude-code": {".claude.json"},
    "cline": {"data/settings/providers.json", "data/settings/global-settings.json"},
    "codex": {"config.toml"},
    "continue": {"config.yaml"},
    "droid": {".factory/settings.json"},
    "gemini-cli": {".gemini/settings.json"},
    "hermes": {"config.yaml"},
    "kilo": {"config/kilo/kilo.json"},
    "kimi-code": {"config.toml"},
    "openclaw": {"openclaw.json"},
    "opencode": {"config/opencode/opencode.json"},
    "pi": {"models.json"},
    "qwen-code": {"settings.json"},
}


@pytest.mark.parametrize("name", SHIPPED)
def test_of_each_harness(name, tmp_path):
    launch = prepared(name, tmp_path, context=40960)
    wanted = {variable: value.replace("{dir}", str(tmp_path)) for variable, value in ENV[name].items()}
    assert {variable: launch.env.get(variable) for variable in wanted} == wanted
    assert launch.argv == tuple(word.replace("{dir}", str(tmp_path)) for word in PROGRAMS.get(name, ()))
    assert {str(path.relative_to(tmp_path)) for path in launch.files} == FILES.get(name, set())
    said = [*launch.env.values(), *launch.files.values()]
    assert any(base(name) in text for text in said)
    assert any(KEY in text for text in said)
    assert not any(KEY in argument for argument in launch.argv), "a command line is seen by everybody on the machine"
    assert list(tmp_path.iterdir()) == []


def read(name, directory, **changed):
    """The data of the first file of a harness."""
    path, text = next(iter(prepared(name, directory, **changed).files.items()))
    return (tomllib.loads if path.suffix == ".toml" else json.loads)(text)


def test_files_hold_what_the_harnesses_read(tmp_path):
    codex = read("codex", tmp_path)
    assert (codex["model"], codex["model_provider"], codex["analytics"]) == (MODEL, "tokencache", {"enabled": False})
    assert codex["model_providers"]["tokencache"] == {
        "name": "tokencache",
        "base_url": base("codex") + "/v1",
        "env_key": "TOKENCACHE_API_KEY",
        "wire_api": "responses",
    }
    kimi = read("kimi-code", tmp_path, context=32768)
    assert kimi["default_model"] == f"tokencache/{MODEL}"
    assert kimi["providers"]["tokencache"] == {"type": "openai", "base_url": base("kimi-code") + "/v1", "api_key": KEY}
    assert kimi["models"][f"tokencache/{MODEL}"]["max_context_size"] == 32768
    hermes = read("hermes", tmp_path)
    assert hermes["model"]["default"] == hermes["custom_providers"][0]["model"] == MODEL
    assert hermes["custom_providers"][0]["base_url"] == hermes["model"]["base_url"] == base("hermes") + "/v1"
    assert hermes["custom_providers"][0]["api_key"] == KEY
    opencode = read("opencode", tmp_path, context=32768)
    assert opencode["model"] == opencode["small_model"] == f"tokencache/{MODEL}"
    provider = opencode["provider"]["tokencache"]
    assert provider["options"] == {"baseURL": base("opencode") + "/v1", "apiKey": "{env:TOKENCACHE_API_KEY}"}
    assert provider["models"][MODEL]["limit"] == {"context": 32768, "output": 8192}
    pi = read("pi", tmp_path)["providers"]["tokencache"]
    assert (pi["baseUrl"], pi["apiKey"], pi["models"][0]["id"]) == (base("pi") + "/v1", KEY, MODEL)
    assert pi["models"][0]["contextWindow"] == 131072
    openclaw = read("openclaw", tmp_path)
    assert (openclaw["update"], openclaw["agents"]["defaults"]["model"]["primary"]) == ({"checkOnStart": False}, f"tokencache/{MODEL}")
    provider = openclaw["models"]["providers"]["tokencache"]
    assert (provider["baseUrl"], provider["apiKey"], provider["models"][0]["id"]) == (base("openclaw") + "/v1", KEY, MODEL)
    kilo = read("kilo", tmp_path)
    assert (kilo["model"], kilo["provider"]["tokencache"]["options"]["baseURL"]) == (f"tokencache/{MODEL}", base("kilo") + "/v1")
    cline = read("cline", tmp_path)["providers"]["openai-compatible"]["settings"]
    assert (cline["baseUrl"], cline["apiKey"], cline["model"]) == (base("cline") + "/v1", KEY, MODEL)
    droid = read("droid", tmp_path)
    (model,) = droid["customModels"]
    assert (model["baseUrl"], model["apiKey"], droid["model"]) == (base("droid") + "/v1", KEY, f"custom:{MODEL}-0")
    assert read("qwen-code", tmp_path)["security"] == {"auth": {"selectedType": "openai"}}
    assert read("gemini-cli", tmp_path)["privacy"] == {"usageStatisticsEnabled": False}


def test_a_session_without_a_key_is_named_by_one(tmp_path):
    assert prepared("openai", tmp_path, key=None).env["OPENAI_API_KEY"] == f"tcs-{SESSION}"


def test_a_proxy_with_a_path(tmp_path):
    env = prepared("anthropic", tmp_path, proxy_url="https://gate.example/rl/").env
    assert env["ANTHROPIC_BASE_URL"] == f"https://gate.example/rl/s/{SESSION}/h/anthropic"


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8100", "localhost:8100", "ftp://h/", "http://", "http://h:port", "http://[::1", "http://h/?a=b"]
)
def test_no_url(tmp_path, url):
    with pytest.raises(AdapterError, match="not the base URL"):
        prepared("openai", tmp_path, proxy_url=url)


@pytest.mark.parametrize("session", ["", "a/b", "..", "a b", "ä", "a\n"])
def test_no_session(tmp_path, session):
    with pytest.raises(HarnessError, match="not a valid session name"):
        prepared("openai", tmp_path, session=session)


@pytest.mark.parametrize("field", ["key", "model"])
def test_what_would_break_out_of_a_line(tmp_path, field):
    with pytest.raises(AdapterError, match=f"{field}: .*cannot be printed"):
        prepared("openai", tmp_path, **{field: "m\nrm -rf x"})


def test_the_harness_sees_no_variable_of_ours(tmp_path):
    """The trainer's and the engine's keys may stand in the shell that starts a harness; an agent reads its environment."""
    mine = {"PATH": "/bin", "TOKENCACHE_ADMIN_KEY": "a", "TOKENCACHE_UPSTREAM_KEY": "b", "ANTHROPIC_API_KEY": "c", "DISABLE_TELEMETRY": "0"}
    launch = prepared("claude-code", tmp_path)
    assert launch.environment(mine) == {"PATH": "/bin", **launch.env}
    assert prepared("codex", tmp_path).environment(mine)["TOKENCACHE_API_KEY"] == KEY


@pytest.mark.parametrize(
    ("proxy", "mine", "direct"),
    [
        ("http://127.0.0.1:8100", {"HTTP_PROXY": "http://web:3128"}, "127.0.0.1"),
        ("http://localhost:8100", {"https_proxy": "http://web:3128", "NO_PROXY": ".local,10.0.0.0/8"}, ".local,10.0.0.0/8,localhost"),
        ("http://127.0.0.1:8100", {"ALL_PROXY": "socks5://web:1080", "no_proxy": "*"}, None),
        ("http://127.0.0.1:8100", {"NO_PROXY": ".local"}, None),
        (PROXY, {"HTTP_PROXY": "http://web:3128"}, None),
    ],
)
def test_a_web_proxy_is_not_asked_for_this_machine(tmp_path, proxy, mine, direct):
    launch = prepared("openai", tmp_path, proxy_url=proxy)
    named = {} if direct is None else {"NO_PROXY": direct, "no_proxy": direct}
    assert launch.environment(mine) == {**mine, **named, **launch.env}


def test_each_spelling_of_no_proxy_keeps_what_it_has(tmp_path):
    """Go reads the upper case first, Python and curl the lower case, and Python also any other."""
    launch = prepared("openai", tmp_path, proxy_url="http://127.0.0.1:8100")
    mine = {"HTTP_PROXY": "http://web:3128", "NO_PROXY": ".local", "no_proxy": "*", "No_Proxy": "10.0.0.0/8"}
    named = {"NO_PROXY": ".local,127.0.0.1", "no_proxy": "*", "No_Proxy": "10.0.0.0/8,127.0.0.1"}
    assert launch.environment(mine) == {**mine, **named, **launch.env}


odd = st.sampled_from(['"', "\\", "'", "a.b", "\x7f", "\x01", "\n", "ü", "yes", "1e3", "{}", "- a", "# a", "*a"])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | odd


def tables(texts):
    """Data as an adapter's file may hold it."""
    scalars = texts | st.booleans() | st.integers(-(2**53), 2**53)
    return st.recursive(
        st.dictionaries(texts, scalars | st.lists(scalars, max_size=3), max_size=3),
        lambda below: st.dictionaries(texts, scalars | below | st.lists(below, max_size=2), max_size=3),
        max_leaves=8,
    )


@given(tables(texts))
def test_toml_is_read_as_it_was_meant(table):
    assert tomllib.loads(render("toml", table)) == table


@given(tables(texts.filter(str.isprintable)))
def test_yaml_is_read_as_it_was_meant(table):
    assert yaml.safe_load(render("yaml", table)) == table

"""Adapters' files: those that come along are right, and a wrong one is refused by file and field."""

import re
from pathlib import Path

import pytest

from tests.adapters.kit import SHIPPED
from tokencache.adapters.load import AdapterError, load, load_all, load_file, shipped
from tokencache.core.rules import RULES

GOOD = 'title = "Mine"\ndialects = ["chat"]\ninstall = "pip install mine"\n'


def write(directory: Path, text: str, name: str = "mine") -> Path:
    path = directory / f"{name}.toml"
    path.write_text(text)
    return path


def test_there_is_one_for_every_harness():
    assert set(SHIPPED) == {
        *("claude-code", "codex", "hermes", "opencode", "qwen-code", "gemini-cli", "pi", "kimi-code", "mini-swe-agent"),
        *("openhands", "terminus-2", "openai-agents", "langgraph", "pydantic-ai", "smolagents", "openai", "anthropic", "crewai"),
        *("openclaw", "strands", "google-adk", "agno"),
        *("openclaw", "copilot", "kilo", "cline", "continue", "droid"),
    }
    assert {path.name for path in shipped().iterdir()} == {"README.md", *(f"{name}.toml" for name in SHIPPED)}


@pytest.mark.parametrize("adapter", SHIPPED.values(), ids=SHIPPED)
def test_it_has_the_required_notes(adapter):
    assert adapter.title
    assert adapter.install
    assert adapter.tested or adapter.name in {"openai", "anthropic"}
    assert adapter.program or adapter.code, "how is it started, or used?"
    assert "{url}" in "".join([*adapter.variables.values(), *(str(file.content) for file in adapter.files)])


def test_what_is_vouched_for_is_no_more_than_was_seen():
    """The rules that change values stand in the adapters of the harnesses that were caught at it."""
    habits = {rule: {name for name, adapter in SHIPPED.items() if rule in adapter.mutations.rules} for rule in RULES}
    assert [
        rule.name for rule in RULES.values() if rule.kind == "harness" and len(habits[rule.name]) != len(set(rule.harnesses) - {"Crush"})
    ] == []
    assert habits["cd-prefix"] == habits["coerced-values"] == habits["unparsed-input"] == {"claude-code"}
    assert habits["secrets-masked"] == habits["markup-removed"] == habits["empty-marker"] == {"hermes"}
    assert habits["args-repaired"] == {"pi", "langgraph", "qwen-code"}
    assert habits["args-emptied"] == {"kimi-code", "qwen-code", "strands"}
    assert habits["blank-marked"] == habits["name-replaced"] == {"strands"}
    assert habits["invalid-tool"] == {"opencode"}
    assert habits["calls-as-text"] == {"smolagents"}
    assert habits["name-lowered"] == {"hermes", "opencode", "kilo", "crewai"}


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [
        ("claude-cli/2.1.329 (external, sdk-cli)", "claude-code"),
        ("codex_exec/0.169.0 (Debian 12.0.0; x86_64) dumb (codex_exec; 0.169.0)", "codex"),
        ("codex_cli_rs/0.169.0 (Debian 12.0.0; x86_64)", "codex"),
        ("opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14", "opencode"),
        ("QwenCode/0.24.4 (linux; x64)", "qwen-code"),
        ("GeminiCLI-tui/0.61.0/Org/test-Model (linux; x64; terminal)", "gemini-cli"),
        ("pi (linux 6.18.44; x64)", "pi"),
        ("kimi-code-cli/2.1.0", "kimi-code"),
        ("Agents/Python 0.24.0", "openai-agents"),
        ("pydantic-ai/2.68.0", "pydantic-ai"),
        ("Kilo-Code/7.7.7 ai-sdk/provider-utils/4.0.27 runtime/bun/1.3.14", "kilo"),
        ("factory-cli/0.215.0", "droid"),
        ("OpenAI/JS 7.15.0", None),  # OpenClaw, Copilot CLI
        ("ls/JS 5.23.2", None),  # Continue
        ("ai-sdk/openai-compatible/3.0.37 ai-sdk/provider-utils/5.0.30 runtime/bun/1.3.13", None),  # Cline
        ("OpenAI/Python 2.24.0", None),  # Hermes, LangChain, smolagents, CrewAI and everybody else
        ("litellm/1.106.2", None),  # mini-swe-agent, OpenHands, Terminus-2
        ("curl/8.5.0", None),
    ],
)
def test_who_is_recognised_by_the_user_agent(user_agent, name):
    """As captured from the programs themselves."""
    found = [adapter.name for adapter in SHIPPED.values() if adapter.user_agent and re.search(adapter.user_agent, user_agent)]
    assert found == ([name] if name else [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title = = 1", "line 1"),
        ('title = "Mine"', "`dialects`"),
        (GOOD + "verison = 1", "`verison`"),
        (GOOD + 'name = "other"', "name:"),
        (GOOD.replace("chat", "chats"), "dialects: there is no dialect 'chats'"),
        (GOOD.replace('"chat"', ""), "dialects: name at least one"),
        (GOOD + "tested = 1.5", "array.*tested"),
        (GOOD + 'user_agent = "["', "user_agent: '\\['"),
        (GOOD + '[mutations]\nrule = ["whitespace"]', "`rule`.*mutations"),
        (GOOD + '[mutations]\nrules = ["whitespace", "whitespcae"]', "rules: unknown: whitespcae.*mutations"),
        (GOOD + '[mutations]\nrules = ["whitespace", "whitespace"]', "named twice.*mutations"),
        (GOOD + '[env]\nBASE = "{ulr}"', "env.BASE: unknown placeholder {ulr}"),
        (GOOD + '[quiet]\nBASE = "{ulr}"', "quiet.BASE: unknown placeholder"),
        (GOOD + 'program = ["mine", "{mdel}"]', "program: unknown placeholder {mdel}"),
        (GOOD + "[env]\nBASE = 1", "env"),
        (GOOD + '[env]\n"A B" = ""', "env: 'A B'"),
        (GOOD + 'unset = ["A-B"]', "unset: 'A-B'"),
        (GOOD + 'unset = ["A"]\n[env]\nA = ""', "unset: A is in more than one"),
        (GOOD + '[env]\nA = ""\n[quiet]\nA = ""', "A is in more than one"),
        (GOOD + '[wire]\nsession = ["X-Id"]', "'X-Id'.*wire"),
        (GOOD + '[[files]]\npath = "a.ini"\nformat = "ini"\ncontent = {}', "'ini'.*files"),
        (GOOD + '[[files]]\npath = "/etc/a"\nformat = "json"\ncontent = {}', "path: '/etc/a'.*files"),
        (GOOD + '[[files]]\npath = "../a"\nformat = "json"\ncontent = {}', r"path: '\.\./a'.*files"),
        (GOOD + '[[files]]\npath = "."\nformat = "json"\ncontent = {}', r"path: '\.'.*files"),
        (
            GOOD + '[[files]]\npath = "a"\nformat = "json"\ncontent = { a = [{ "{nmae}" = 1 }] }',
            "content: unknown placeholder {nmae}.*files",
        ),
        (GOOD + 2 * '[[files]]\npath = "a"\nformat = "json"\ncontent = {}\n', "files: a path is named twice"),
    ],
)
def test_what_is_refused(tmp_path, text, said):
    path = write(tmp_path, text)
    with pytest.raises(AdapterError, match=f"(?s){re.escape(str(path))}: .*{said}"):
        load_file(path)


def test_braces_around_other_things_are_text(tmp_path):
    load_file(write(tmp_path, GOOD + """[env]\nA = '{"x": {}}{env:KEY}${HOME}{ url }'"""))


def test_a_name_that_would_not_fit_a_url(tmp_path):
    path = write(tmp_path, GOOD, name="My Harness")
    with pytest.raises(AdapterError, match="'My Harness'"):
        load_file(path)


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b'title = "\xff"')
    with pytest.raises(AdapterError, match=r"mine\.toml"):
        load_all([tmp_path])


def test_ones_own_stand_beside_those_that_come_along(tmp_path):
    write(tmp_path, GOOD)
    write(tmp_path, GOOD.replace("Mine", "My Pi"), name="pi")
    adapters = load_all([tmp_path])
    assert list(adapters) == sorted({*SHIPPED, "mine"})
    assert (adapters["mine"].title, adapters["pi"].title, adapters["codex"]) == ("Mine", "My Pi", SHIPPED["codex"])
    assert load("mine", [tmp_path]).mutations.rules == ()


def test_no_such_directory_or_harness(tmp_path):
    with pytest.raises(AdapterError, match="nowhere: no such directory"):
        load_all([tmp_path / "nowhere"])
    with pytest.raises(AdapterError, match=r"no adapter 'mine'; there are agno, .*--adapters"):
        load("mine")

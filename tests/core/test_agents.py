"""How harnesses name their agents: the headers and members of recorded traffic, and what is not taken as a name."""

import json
from pathlib import Path

import pytest

import tests.system.corpus
from tokencache.core.agents import HEADERS, AgentLabel, read_agent

CORPUS = Path(tests.system.corpus.__file__).parent
CLAUDE, CODEX, OPENCODE = "claude-code_agents-2.1.329", "codex_agents-0.169.0", "opencode_task-1.18.33"


def labels(recording, *, headers=True):
    """The labels of a recording's calls, each once, in order."""
    found = []
    for line in (CORPUS / f"{recording}.jsonl").read_text(encoding="utf-8").splitlines()[1:]:
        call = json.loads(line)
        if "path" in call:
            members = {
                name: value if isinstance(value, str) else '{"a": {}}' for name, value in call["body"].get("client_metadata", {}).items()
            }
            body = json.dumps({"input": [], "client_metadata": members}).encode()
            found.append(read_agent(call["headers"] if headers else {}, body))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("recording", [CLAUDE, CODEX, OPENCODE])
def test_sub_agents_of_recorded_traffic_name_their_parent(recording):
    main, *others = [label for label in labels(recording) if label is not None]
    assert main.id
    assert not main.parent
    assert others
    assert {other.parent for other in others} == {main.id}
    assert len({main.id, *(other.id for other in others)}) == 1 + len(others)
    assert {other.kind for other in others} == ({"collab_spawn"} if recording == CODEX else {""})


def test_members_count_where_a_relay_drops_headers():
    assert labels(CODEX, headers=False) == labels(CODEX)
    user = json.dumps({"device_id": "d", "session_id": "s-1"})
    assert read_agent({}, json.dumps({"metadata": {"user_id": user}}).encode()) == AgentLabel("s-1")


@pytest.mark.parametrize(
    ("headers", "label"),
    [
        ({"X-Dynamo-Session-ID": "child", "X-Dynamo-Parent-Session-ID": "top"}, AgentLabel("child", "top")),
        (
            {"X-Switchyard-Session-ID": "s", "X-Switchyard-Agent-Id": "a", "X-Switchyard-Agent-Kind": "review"},
            AgentLabel("a", "", "review"),
        ),
        ({"X-Switchyard-Agent-Id": "a", "X-Claude-Code-Agent-Id": "b", "X-Claude-Code-Session-Id": "s"}, AgentLabel("a", "s")),
        ({"X-Claude-Code-Agent-Id": "b", "X-Claude-Code-Session-Id": "s"}, AgentLabel("b", "s")),
        ({"X-Claude-Code-Agent-Id": "s", "X-Claude-Code-Session-Id": "s"}, AgentLabel("s")),
        ({"X-Session-Id": "x" * 201}, None),
        ({"X-Session-Id": "a\x1b[31m"}, None),
        ({"X-Session-Id": ""}, None),
        ({"X-Request-Id": "r"}, None),
    ],
)
def test_headers(headers, label):
    assert read_agent(headers, b"") == label


@pytest.mark.parametrize(
    "body",
    [
        b'{"metadata": {"user_id": "user-7"}}',
        b'{"metadata": {"user_id": "[1]"}}',
        b'{"client_metadata": {"thread_id": 7}}',
        b'{"client_metadata": {"thread_id": "\xff"}}',
        b'{"messages": [{"content": "\\"client_metadata\\": {\\"thread_id\\": \\"t\\"}"}]}',
        b'{"client_metadata": {"thread_id": "' + b"x" * 300 + b'"}}',
    ],
)
def test_what_is_no_name(body):
    assert read_agent({}, body) is None


def test_all_headers_are_in_lower_case():
    assert all(name == name.lower() for name in HEADERS)

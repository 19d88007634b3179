"""Reads how a harness names the agent that calls the model, and the agent that started it: headers and members of its requests.

This is a label for people. It proves nothing, decides nothing, and is recorded as the client sent it: any client can write any name.

==============  =====================================  ================================================  =========================
who             agent                                  parent                                            kind
==============  =====================================  ================================================  =========================
Claude Code     `x-claude-code-agent-id`, or           `x-claude-code-parent-agent-id`, or its session
                `x-claude-code-session-id`             if the agent is another
Codex           `thread-id`                            `x-codex-parent-thread-id`                        `x-openai-subagent`
OpenCode        `x-session-id`                         `x-parent-session-id`
Dynamo          `x-dynamo-session-id`                  `x-dynamo-parent-session-id`
Switchyard      `x-switchyard-agent-id`, or            `x-switchyard-parent-agent-id`                    `x-switchyard-agent-kind`
                `x-switchyard-session-id`
==============  =====================================  ================================================  =========================

Sources: recorded traffic of Claude Code 2.1.329, Codex 0.169.0 and OpenCode 1.18.33 (`tests/system/corpus`); Dynamo 1.6.1; Switchyard
0.3.0, whose order of precedence holds here too. Where a relay drops headers, the members of the same name count: Codex repeats them in
`client_metadata`, and Claude Code its session in `metadata.user_id`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

_AGENT = ("x-switchyard-agent-id", "x-claude-code-agent-id", "x-dynamo-session-id", "thread-id")
_SESSION = ("x-switchyard-session-id", "x-claude-code-session-id", "x-session-id", "session-id")
_CLAUDE = "x-claude-code-agent-id"
_PARENT = ("x-switchyard-parent-agent-id", "x-claude-code-parent-agent-id", "x-dynamo-parent-session-id", "x-codex-parent-thread-id",
           "x-parent-session-id")  # fmt: skip
_KIND = ("x-switchyard-agent-kind", "x-openai-subagent")
HEADERS = frozenset({*_AGENT, *_SESSION, *_PARENT, *_KIND})
"""The headers that name an agent, in lower case."""
MEMBERS = (b'"client_metadata"', b'"user_id"')
"""The members that do; they are searched in the last bytes of a body only."""
SEARCHED = 4096
_LONGEST = 200
_MEMBER = re.compile(r'"(client_metadata|user_id)"\s*:\s*')
_JSON = json.JSONDecoder()
_OF_CODEX = {"thread_id": "thread-id", "session_id": "session-id"}


class AgentLabel(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a harness names the agent that made a call; `""` for what it does not say. A label, not a proof.

    Attributes:
        id: the agent.
        parent: the agent that started it.
        kind: what kind of agent it is, such as `collab_spawn`.
    """

    id: str = ""
    parent: str = ""
    kind: str = ""


def read_agent(headers: Mapping[str, str], body: bytes) -> AgentLabel | None:
    """Read the label of a request; `None` if it has none.

    Args:
        headers: its headers; names in any case.
        body: its body, as the client sent it.
    """
    given = {lower: value for name, value in headers.items() if (lower := name.lower()) in HEADERS and _is_name(value)}
    given = {**_members(body[-SEARCHED:]), **given}
    agent = _first(given, _AGENT) or _first(given, _SESSION)
    parent = _first(given, _PARENT)
    if not parent and _CLAUDE in given:
        parent = given.get("x-claude-code-session-id", "")
    found = AgentLabel(agent, parent if parent != agent else "", _first(given, _KIND))
    return found if found != AgentLabel() else None


def _members(end: bytes) -> dict[str, str]:
    """Read the members at the end of a body, under the names of the headers that they repeat."""
    found: dict[str, Any] = {}
    text = end.decode("utf-8", "surrogateescape")
    for member in _MEMBER.finditer(text):
        try:
            value, _ = _JSON.raw_decode(text, member.end())
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            continue  # it is a label: another form of it is none
        if isinstance(value, dict) and member[1] == "user_id":
            found["x-claude-code-session-id"] = value.get("session_id")
        elif isinstance(value, dict):
            found |= {str(_OF_CODEX.get(name, name)): one for name, one in value.items()}
    return {name: value for name, value in found.items() if name in HEADERS and isinstance(value, str) and _is_name(value)}


def _is_name(value: str) -> bool:
    return 0 < len(value) <= _LONGEST and value.isprintable()


def _first(given: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((given[name] for name in names if name in given), "")

"""Work on texts that a harness or a model chooses grows with their length, not with its square: counted, not timed."""

import ast
import asyncio
import functools
import importlib
import json
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import tokencache
from tests.support.pairwise import some
from tests.support.reading import read_chat
from tests.support.regex_steps import KINDS, too_many_steps
from tests.support.work import counting
from tokencache.adapters.load import load_all
from tokencache.core.chain import build_conversation, lookup_keys, turn_keys
from tokencache.core.edited import is_edited_reply
from tokencache.core.match import Hit, match
from tokencache.core.messages import Message, ToolCall, canonical_arguments, digest
from tokencache.core.rules import RULES, STRICT, Leniency
from tokencache.core.turn import Turn
from tokencache.core.verdict import Cut, delivered_prefix, is_unique, judge, may_be_delivered, pack_cuts
from tokencache.dialects import gym_request
from tokencache.dialects.base import DialectRequest, ModelCall
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.registry import dialect_of
from tokencache.dialects.sse import EventSplitter
from tokencache.engine.reply import Reply
from tokencache.proxy.client_ids import _has_word, _same_words
from tokencache.proxy.delivery import StreamDelivery

PACKAGES = ("api", "core", "dialects", "engine", "proxy", "server", "store", "trajectories", "session_url", "logs", "net", "errors")
"""Packages that see texts of harnesses and models."""
HOW = {"match": "match", "fullmatch": "fullmatch", **dict.fromkeys(("search", "sub", "subn", "split", "finditer", "findall"), "search")}
OWN_TEXTS = {"tokencache.api.viewer.routes"}
"""Modules with expressions for texts of the package itself."""


class Use(NamedTuple):
    """A regular expression, where it is, and how it is used."""

    where: str
    pattern: "re.Pattern[str] | re.Pattern[bytes]"
    how: str


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(tokencache.__path__, "tokencache."):
        if found.name.split(".")[1] in PACKAGES and found.name not in OWN_TEXTS:
            yield found.name


def expressions(value: object) -> "list[re.Pattern[Any]]":
    """The regular expressions that a variable holds, itself or in a tuple."""
    return [held for held in (value if isinstance(value, tuple) else (value,)) if isinstance(held, re.Pattern)]


def uses() -> list[Use]:
    """Every regular expression of these modules; one whose use is not seen counts as searched for."""
    how: dict[tuple[str, str], set[str]] = defaultdict(set)
    found: list[Use] = []
    for name in modules():
        module = importlib.import_module(name)
        if not any(value is re or expressions(value) for value in vars(module).values()):
            continue  # most modules: to parse them all would take seconds, in every worker
        nodes = list(ast.walk(ast.parse(Path(module.__file__ or "").read_text())))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        imported = {alias.asname or alias.name: (node.module, alias.name) for node in imports for alias in node.names}
        for call in [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]:
            method, owner = call.func.attr, call.func.value
            if method not in HOW or not isinstance(owner, ast.Name):
                continue
            if owner.id == "re":
                assert isinstance(call.args[0], ast.Constant), f"{name}:{call.lineno}: an expression is made from a text"
                found.append(Use(f"{name}:{method}", re.compile(call.args[0].value), HOW[method]))
            else:
                how[imported.get(owner.id, (name, owner.id))].add(HOW[method])
    for name in modules():
        for member, value in vars(importlib.import_module(name)).items():
            ways = how[name, member] or {"search"}
            found += [Use(f"{name}.{member}", pattern, way) for pattern in expressions(value) for way in sorted(ways)]
    for harness, adapter in load_all().items():
        if adapter.user_agent:
            found.append(Use(f"the user agent of {harness}", re.compile(adapter.user_agent), "search"))
    return list({(use.pattern, use.how): use for use in found}.values())


USES = uses()


def test_the_expressions_are_found():
    assert {"tokencache.core.rules.harness._SECRET", "tokencache.core.messages._INLINE_THINK"} <= {use.where for use in USES}


@pytest.mark.parametrize("use", some(USES, 20), ids=[f"{use.where}-{use.how}" for use in USES])
def test_the_steps_of_an_expression_grow_with_the_text(use):
    assert not too_many_steps(use.pattern, use.how)


# Functions.

EVERY_RULE = Leniency(harness_rules=frozenset(rule.name for rule in RULES.values() if rule.kind == "harness"))
HANDLE = "0" * 32


def reply(**members: str) -> Message:
    """A reply with one call; `members` replace its texts."""
    arguments = members.get("arguments", json.dumps({"content": members.get("member", "x")}))
    call = ToolCall(members.get("id", "call_1a2b3c4d"), members.get("name", "Write"), arguments)
    text = f"<think>{members['inline']}" if "inline" in members else members.get("text", "Go.")
    return Message("assistant", text, members.get("reasoning", "r"), (call,))


FIELDS = ("id", "name", "arguments", "member", "text", "inline", "reasoning")


def judged(field: str, text: str) -> None:
    """Compare a reply with a long text with other echoes, and others with it; make its keys, and match it."""
    long, short = reply(**{field: text}), reply()
    other = reply(**{field: text + "[cut]"})
    changed = msgspec.structs.replace(long, content="[cut]", calls=(ToolCall(long.calls[0].id, "Write", '{"content": "[cut]"}'),))
    for served, echoed in ((long, long), (long, short), (short, long), (long, other), (other, long), (long, changed)):
        for leniency in (STRICT, EVERY_RULE):
            judge(served, echoed, leniency)
    asked = build_conversation(b"scope", [Message("user", "go")])
    turn = Turn(id="t", call="c", match="root", served=long, messages=1, position_key=asked.chain[-1])
    for echoed in (long, other, changed):
        history = [Message("user", "go"), echoed, Message("tool", text, answers=echoed.calls[0].id), Message("user", text)]
        conversation = build_conversation(b"scope", history)
        known = {key: [Hit(turn)] for key in (*turn_keys(asked, long, digest(long), leniency=EVERY_RULE), *lookup_keys(conversation))}
        match(conversation, known, EVERY_RULE)
        is_edited_reply(conversation, [turn])
        is_edited_reply(conversation, [msgspec.structs.replace(turn, served=short)])
    canonical_arguments(text)
    is_unique(text)


def interrupted(_: str, text: str) -> None:
    """Find how much of a reply was received, which has an event for each four characters."""
    cuts = pack_cuts([Cut(n, n + 1, n * 4 + 4, 0) for n in range(len(text) // 4)])
    turn = Turn(id="t", call="c", match="root", served=Message("assistant", text), messages=1, cuts=cuts)
    for echoed in (text, text[: len(text) // 2], text.strip() + "x", "Hi", " "):
        may_be_delivered(turn, Message("assistant", echoed))
        delivered_prefix(turn, Message("assistant", echoed), STRICT)


def request(path: str, body: Any) -> DialectRequest:
    return DialectRequest(
        method="POST",
        path=path,
        query={},
        headers={},
        body=json.dumps(body).encode(),
        handle=HANDLE,
        served=None,
        documents=nothing,
        forget=None,
    )


async def nothing(names: Sequence[str]) -> list[bytes | None]:
    return [None for _ in names]


def schema(text: str) -> dict[str, Any]:
    return {"type": "object", "description": text, "properties": {text: {"type": "string", "description": text}}}


def messages_body(text: str) -> dict[str, Any]:
    used = {"type": "tool_use", "id": text, "name": text, "input": {"content": text}}
    blocks = [{"type": "thinking", "thinking": text, "signature": text}, {"type": "text", "text": text}, used]
    answer = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": text, "content": text}]}
    tool = {"name": text, "description": text, "input_schema": schema(text)}
    return {"model": text, "max_tokens": 1, "system": text, "tools": [tool], "messages": [{"role": "assistant", "content": blocks}, answer]}


def responses_body(text: str) -> dict[str, Any]:
    items = [
        {"type": "message", "role": "user", "content": text},
        {"type": "reasoning", "id": text, "content": [{"type": "reasoning_text", "text": text}], "encrypted_content": text},
        {"type": "message", "role": "assistant", "id": text, "content": [{"type": "output_text", "text": text}]},
        {"type": "function_call", "call_id": text, "name": text, "arguments": text},
        {"type": "function_call_output", "call_id": text, "output": text},
    ]
    tools = [{"type": "function", "name": text, "description": text, "parameters": schema(text)}]
    return {"model": text, "instructions": text, "input": items, "tools": tools}


def gemini_body(text: str) -> dict[str, Any]:
    called = {"functionCall": {"id": text, "name": text, "args": {"content": text}}, "thoughtSignature": text}
    answered = {"functionResponse": {"id": text, "name": text, "response": {"output": text}}}
    contents = [
        {"role": "user", "parts": [{"text": text}]},
        {"role": "model", "parts": [{"text": text, "thought": True}, {"text": text}, called]},
        {"role": "user", "parts": [answered]},
    ]
    declared = {"name": text, "description": text, "parametersJsonSchema": schema(text)}
    return {"systemInstruction": text, "contents": contents, "tools": [{"functionDeclarations": [declared]}]}


def chat_body(text: str) -> dict[str, Any]:
    function = {"name": text, "arguments": text}
    answer = {
        "role": "assistant",
        "content": text,
        "reasoning_content": text,
        "tool_calls": [{"id": text, "type": "function", "function": function}],
    }
    listed = [{"role": "system", "content": text}, {"role": "user", "content": [{"type": "text", "text": text}]}, answer]
    tool = {"type": "function", "function": {"name": text, "description": text, "parameters": schema(text)}}
    return {"model": text, "messages": [*listed, {"role": "tool", "tool_call_id": text, "content": text}], "tools": [tool]}


DIALECTS = {
    "messages": ("/v1/messages", messages_body),
    "responses": ("/v1/responses", responses_body),
    "gemini": ("/v1beta/models/m:generateContent", gemini_body),
}


def parsed(name: str, text: str) -> None:
    """Parse a request with a text in every field, and its chat request with NeMo Gym's rewriting and without."""
    if name == "chat":
        body = json.dumps(chat_body(text)).encode()
    else:
        path, make = DIALECTS[name]
        dialect = dialect_of("POST", path, {})
        assert dialect is not None
        called = run(dialect.parse(request(path, make(text))))
        assert isinstance(called, ModelCall)
        body = called.body
    for rewrite in (None, gym_request.chat_members):
        read_chat(body, IncrementalParser(), "s", rewrite=rewrite)


def replied(name: str, text: str) -> None:
    """Write a reply with a text in every field: whole, and as a stream with an event for each four characters of it."""
    path, make = DIALECTS[name]
    dialect = dialect_of("POST", path, {})
    assert dialect is not None
    custom = {"tools": [{"type": "custom", "name": "f"}]} if name == "responses" else {}
    calls = [run(dialect.parse(request(path, make("x") | custom))) for _ in range(2)]
    assert all(isinstance(call, ModelCall) for call in calls)
    function = {"name": "f", "arguments": text}
    message = {"content": text, "reasoning": text, "tool_calls": [{"index": 0, "id": text, "function": function}]}
    calls[0].encoder.whole(json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode())
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    deltas = [{name: piece} for name in ("reasoning", "content") for piece in pieces]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece, "name": "" if n else "f"}}]} for n, piece in enumerate(pieces)]
    collected = Reply()
    for delta in deltas:
        data = json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()
        calls[1].encoder.chunk(b"", data, 1)
        collected.add(data)
    calls[1].encoder.chunk(b"", b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}', 1)
    calls[1].encoder.end()
    collected.choices[0].message(with_reasoning=True)


def run(parsing: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing but its turn."""
    with asyncio.Runner() as runner:
        return runner.run(parsing)


def split(_: str, text: str) -> None:
    """Split a stream of which each event arrives in many pieces."""
    splitter = EventSplitter()
    for line_end in (b"\n", b"\r", b""):
        for piece in (*(text[at : at + 4].encode() + line_end for at in range(0, len(text), 4)), b"\n\n"):
            list(splitter.feed(piece))


def proven(_: str, text: str) -> None:
    """Compare a sampled text with the words of a message (NeMo Gym's ids)."""
    message = reply(member=text)
    for sampled in (text, text + message.calls[0].arguments + text):
        _same_words(sampled, text, message)
        _has_word(sampled, text)


def listed(name: str, text: str) -> None:
    """Parse a request with a call, a result, a text and a tool for each character, the results in reverse order."""
    ids = [f"call_{n}" for n in range(len(text))]
    if name == "chat":
        calls = [{"id": call, "type": "function", "function": {"name": "f", "arguments": "{}"}} for call in ids]
        history = [
            {"role": "assistant", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": call, "content": ""} for call in ids[::-1]),
        ]
        read_chat(json.dumps({"model": "m", "messages": history}).encode(), IncrementalParser(), "s")
        return
    if name == "messages":
        blocks = [{"type": "tool_use", "id": call, "name": "f", "input": {}} for call in ids] + [{"type": "text", "text": "x"} for _ in ids]
        answers = [{"type": "tool_result", "tool_use_id": call, "content": ""} for call in ids[::-1]]
        history = [{"role": "assistant", "content": blocks}, {"role": "user", "content": answers}]
        body = {"model": "m", "max_tokens": 1, "messages": history}
    elif name == "responses":
        items = [{"type": "function_call", "call_id": call, "name": call, "arguments": "{}"} for call in ids]
        items += [{"type": "function_call_output", "call_id": call, "output": ""} for call in ids[::-1]]
        tools = [{"type": "function", "name": call} for call in ids]
        body = {"model": "m", "input": items, "tools": tools, "tool_choice": {"type": "allowed_tools", "tools": tools}}
    else:
        called = [{"functionCall": {"id": call, "name": "f", "args": {}}} for call in ids]
        answers = [{"functionResponse": {"id": call, "name": "f", "response": {}}} for call in ids[::-1]]
        parts = [{"text": "x"} for _ in ids]
        contents = [{"role": "model", "parts": [*parts, *called]}, {"role": "user", "parts": answers}]
        parameters = {"type": "OBJECT", "properties": {call: {} for call in ids}, "propertyOrdering": ids}
        functions = [{"name": call, "parameters": parameters if call == ids[0] else None} for call in ids]
        config = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ids}}
        body = {"contents": contents, "tools": [{"functionDeclarations": functions}], "toolConfig": config}
    path, _ = DIALECTS[name]
    dialect = dialect_of("POST", path, {})
    assert dialect is not None
    called_model = run(dialect.parse(request(path, body)))
    assert isinstance(called_model, ModelCall)
    read_chat(called_model.body, IncrementalParser(), "s")


def with_calls(name: str, text: str) -> None:
    """Collect a reply with a call for each character, whole and as a stream, with two events for each; write it, and judge its echo."""
    calls = [{"index": n, "id": f"call_{n:06}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(len(text))]
    begun = [{**call, "function": {"name": "f", "arguments": ""}} for call in calls]
    rest = [{"index": call["index"], "function": {"arguments": "{}"}} for call in calls]
    message = {"tool_calls": calls}
    whole = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls", "token_ids": [1]}]}).encode()
    deltas = [{"tool_calls": [part]} for pair in zip(begun, rest, strict=True) for part in pair]
    events = [json.dumps({"choices": [{"index": 0, "delta": delta, "token_ids": [1]}]}).encode() for delta in deltas]
    if name == "chat":
        replies = [Reply(), Reply()]
        replies[0].add(whole)
        for event in events:
            replies[1].add(event)
        served, echoed = (reply.choices[0].message(with_reasoning=True) for reply in replies)
        for leniency in (STRICT, EVERY_RULE):
            assert judge(served, echoed, leniency).supplied
        return
    path, make = DIALECTS[name]
    dialect = dialect_of("POST", path, {})
    assert dialect is not None
    one, other = (run(dialect.parse(request(path, make("x")))) for _ in range(2))
    assert isinstance(one, ModelCall)
    assert isinstance(other, ModelCall)
    one.encoder.whole(whole)
    for event in (*events, b'{"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}'):
        other.encoder.chunk(b"", event, 1)
    other.encoder.end()


def test_chunks_that_wait_for_the_token_ids_are_not_copied_for_each_further_one():
    """Of several choices one may end long before the others."""
    delivery = StreamDelivery.__new__(StreamDelivery)
    delivery._token_ids, delivery._late = True, None
    delivery._encode(b"", b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}')
    waiting = delivery._late
    delivery._encode(b"", b'{"choices":[{"index":1,"delta":{"content":"a"}}]}')
    assert delivery._late is waiting
    assert len(waiting) == 2


SCENARIOS = [
    *((judged, field) for field in FIELDS),
    *((parsed, name) for name in ("chat", *DIALECTS)),
    *((replied, name) for name in DIALECTS),
    *((scenario, name) for scenario in (listed, with_calls) for name in ("chat", *DIALECTS)),
    *((scenario, "") for scenario in (interrupted, split, proven)),
]


def grows(scenario: Callable[[str, str], None], field: str, n: int = 40) -> list[str]:
    """Return the kinds of repetition for which the work grows faster than the text, with the work for `n` and for 4`n`."""
    found = []
    with counting() as work:
        scenario(field, "a")  # what is made only once
        for kind in KINDS if scenario not in {listed, with_calls} else ("aaaaa",):
            texts = [kind * times + "x" for times in (n, 4 * n)]
            small, large = [work.of(functools.partial(scenario, field, text)) for text in texts]
            if large > 5 * small:
                found.append(f"{kind!r}: {small}, {large}")
    return found


@pytest.mark.parametrize(("scenario", "field"), some(SCENARIOS, 7), ids=[f"{scenario.__name__}-{field}" for scenario, field in SCENARIOS])
def test_the_work_of_a_function_grows_with_the_text(scenario, field):
    assert not grows(scenario, field)

"""Conversations by name, for tests of tails: the history up to the model's reply, and the new messages."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tokencache.core.chain import build_conversation
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.engine.template.shapes import TailRequest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Runs {name}: naïve café.",
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
    }
    for name in ("bash", "look")
]


class Shape(NamedTuple):
    history: list[dict[str, Any]]
    new: list[dict[str, Any]]
    tools: bool = True

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [*self.history, *self.new]


def system(text="Be terse."):
    return {"role": "system", "content": text}


def user(text="Look into  it, please.\n"):
    return {"role": "user", "content": text}


def says(text, *names, think=None):
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps({"cmd": f"ls -l {i} é", "n": "5"})}}
        for i, name in enumerate(names)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if think:
        message["reasoning"] = think
    return {**message, "tool_calls": calls} if calls else message


def result(text="total 0\n-rw-r--r-- a.txt", n=0):
    return {"role": "tool", "tool_call_id": f"call_{n}", "content": text}


def parts(message, *texts):
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


Q, CALL, DONE = user(), says(None, "bash"), says("It is done.")
ROUND = [CALL, result()]

SHAPES = {
    "text → user": Shape([Q, DONE], [user("More?")]),
    "text → user, no tools": Shape([Q, DONE], [user("More?")], tools=False),
    "system: text → user": Shape([system(), Q, DONE], [user("More?")]),
    "developer: text → user": Shape([{**system(), "role": "developer"}, Q, DONE], [user("More?")]),
    "text → two users": Shape([Q, DONE], [user("More?"), user("Or not.")]),
    "text with thinking → user": Shape([system(), Q, says("It is done.", think="Is it?")], [user("More?")]),
    "nothing said → user": Shape([Q, says("")], [user("Hello?")]),
    "parts → parts": Shape([parts(Q, "Look", "here."), parts(DONE, "It is", "done.")], [parts(Q, "And", "there.")]),
    "call → result": Shape([Q, CALL], [result()]),
    "system: call → result": Shape([system(), Q, CALL], [result()]),
    "call, content empty → result": Shape([Q, says("", "bash")], [result()]),
    "call → result in parts": Shape([Q, CALL], [parts(result(), "one", "two")]),
    "text and call → result": Shape([system(), Q, says("I look.", "bash")], [result()]),
    "thinking and call → result": Shape([system(), Q, says("", "bash", think="Where?")], [result()]),
    "two calls → two results": Shape([Q, says(None, "bash", "bash")], [result(), result("no", 1)]),
    "three calls, two tools → three results": Shape(
        [Q, says("I look.", "bash", "look", "bash")], [result(), result("no", 1), result("ja", 2)]
    ),
    "call → result, user": Shape([Q, CALL], [result(), user("Stop that.")]),
    "call → user": Shape([Q, CALL], [user("Stop that.")]),
    "second round: call → result": Shape([Q, *ROUND, says("", "look")], [result("two")]),
    "second round: two calls → two results": Shape([Q, *ROUND, says("", "look", "bash")], [result("two"), result("three", 1)]),
    "third round: call → result": Shape([system(), Q, *ROUND, *ROUND, says("", "bash", think="So.")], [result("two")]),
    "text after results → user": Shape([system(), Q, *ROUND, DONE], [user("More?")]),
    "third question: text → user": Shape([Q, *ROUND, DONE, user("And?"), says("", "look", think="Hm."), result(), DONE], [user("More?")]),
    "third question: call → result": Shape([Q, *ROUND, DONE, user("And?"), DONE, user("So?"), CALL], [result()]),
    "text → system, user": Shape([system(), Q, DONE], [system("Now be kind."), user("More?")]),
    "text → developer, user": Shape([system(), Q, DONE], [{**system("Now be kind."), "role": "developer"}, user("More?")]),
    "developer: text → system, user": Shape([{**system(), "role": "developer"}, Q, DONE], [system("Now be kind."), user("More?")]),
    "call → result, system": Shape([system(), Q, CALL], [result(), system("You have 3 turns left.")]),
    "text → another's text, user": Shape([Q, DONE], [says("I was told to say this."), user("More?")]),
    "call → result, another's call, result": Shape([Q, CALL], [result(), says("", "look"), result("two")]),
}


def ask(messages: Sequence[dict[str, Any]], at: int, until: int, *, tools: bool, kwargs: dict[str, Any] | None = None) -> TailRequest:
    """Ask for the tail behind `messages[at - 1]` up to `messages[until]`, as the planner does."""
    raw = [msgspec.json.encode(message) for message in messages[:until]]
    read = [read_message(message) for message in messages[:until]]
    offered = msgspec.Raw(msgspec.json.encode(TOOLS)) if tools else None
    args = RenderArgs(b"%d" % tools + msgspec.json.encode(kwargs or {}), b"", {}, {}, kwargs or {}, offered)
    return TailRequest("m", args, build_conversation(b"m", read), raw, at, read[at - 1])

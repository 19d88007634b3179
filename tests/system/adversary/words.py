"""Compares messages in normalised form, and rewrites them in harmless ways.

Written from docs/rules.md, not from the product's code, so that the two do not share mistakes.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection

Message = dict[str, Any]

_THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_BLANK = "".join(chr(code) for code in range(0x3001) if chr(code).isspace()) + "\ufeff"
_LONE = re.compile("[\ud800-\udfff]")
DRAWN = re.compile(r"(?=[a-zA-Z]*[0-9])[0-9a-zA-Z]{8,}$")
"""An id that was drawn at random, so that it is unique. Other ids count calls, and clients count, too."""


def stripped(text: str) -> str:
    """A text without the white space, and the byte order marks, around it."""
    before = None
    while text != before:
        before, text = text, text.strip().strip("\ufeff")
    return text


def text_of(message: Message) -> str:
    """The text of a message: parts are joined with newlines, a missing text is empty."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _parted(message: Message) -> tuple[str, str]:
    """The reasoning at the beginning of a reply's text, and the rest."""
    text = text_of(message)
    inline = _THINK.match(text)
    return (stripped(inline[1]), stripped(text[inline.end() :])) if inline else ("", stripped(text))


def shown(message: Message) -> str:
    """The text of a reply without inline reasoning, and without the white space before it."""
    text = text_of(message)
    inline = _THINK.match(text)
    return (text[inline.end() :] if inline else text).lstrip(_BLANK)


def arguments_of(text: Any) -> str:
    """The value of a call's arguments: equal for all forms of one value; text that is not JSON equals only itself."""
    if not isinstance(text, str):
        text = json.dumps(text)
    if not stripped(text):
        return "{}"
    try:
        value = json.loads(stripped(text), parse_int=_number, parse_float=_number, parse_constant=_number)
    except (ValueError, RecursionError):
        return f"no JSON: {text}"
    return json.dumps(_clean(value), sort_keys=True)


def _number(written: str) -> str:
    value = float(written)
    finite = f"\0number {value + 0.0!r}"
    return finite if math.isfinite(value) else f"\0number {written}" if written.strip("-").isdecimal() else f"\0number {value}"


def _clean(value: Any) -> Any:
    """A value whose texts are marked, because its numbers have become texts."""
    if isinstance(value, str):
        return value if value.startswith("\0number ") else "text " + _LONE.sub("\ufffd", value)
    if isinstance(value, list):
        return list(map(_clean, value))
    return {_LONE.sub("\ufffd", name): _clean(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def meaning(message: Message) -> tuple[Any, ...]:
    """A message's role and words; for a reply without its reasoning, and without the ids of its calls."""
    role = "system" if message["role"] == "developer" else message["role"]
    if role != "assistant":
        return role, stripped(text_of(message)), message.get("name") if role != "tool" else None
    calls = tuple((call["function"]["name"], arguments_of(call["function"]["arguments"])) for call in message.get("tool_calls") or ())
    return role, _parted(message)[1], calls


def thoughts(message: Message) -> set[str]:
    """The reasoning of a reply, in its own member or in the text."""
    member = message.get("reasoning") or message.get("reasoning_content") or ""
    return {stripped(member), _parted(message)[0]} - {""}


def cut_thought(reply: Message) -> Message | None:
    """A reply whose whole text is thinking that was cut off, with that as its reasoning (rule `inline-think`); `None` for another reply."""
    text = text_of(reply).lstrip(_BLANK)
    if reply.get("reasoning") or not text.startswith("<think>") or "</think>" in text:
        return None
    return {**reply, "content": None, "reasoning": text.removeprefix("<think>")}


def says(message: Message, reply: Message) -> bool:
    """Whether a message has the words of a reply, and no other reasoning."""
    return meaning(message) == meaning(reply) and thoughts(message) <= thoughts(reply)


def call_ids(message: Message) -> tuple[str, ...]:
    """The ids of a message's calls."""
    return tuple(call["id"] for call in message.get("tool_calls") or ())


def safe(name: str) -> str:
    """An id as written by clients that allow few characters."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


# --- other forms ------------------------------------------------------------------------------------------------------


def with_blanks_of(message: Message, reply: Message) -> Message:
    """The reply, its text ending with the white space at the end of the message's text; unchanged if it has no text."""
    text, written = text_of(reply).rstrip(_BLANK), text_of(message)
    blanks = written[len(written.rstrip(_BLANK)) :]
    return {**reply, "content": text + blanks} if text else reply


def trimmed(message: Message, _: random.Random) -> Message:
    return {**message, "content": stripped(message["content"])} if isinstance(message.get("content"), str) else message


def padded(message: Message, rng: random.Random) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": rng.choice(["", " ", "\n", "\ufeff"]) + message["content"] + rng.choice(["\n", "\u00a0", "  "])}


def blank(message: Message, rng: random.Random) -> Message:
    if stripped(text_of(message)):
        return message
    other = {name: value for name, value in message.items() if name != "content"}
    return rng.choice([other, {**message, "content": None}, {**message, "content": ""}, {**message, "content": " \n"}])


def in_parts(message: Message, _: random.Random) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) and content else message


def rewritten_json(message: Message, rng: random.Random) -> Message:
    """The arguments serialised again, as JavaScript, Python or a pretty-printer would."""

    def one(call: Message) -> Message:
        arguments = call["function"]["arguments"]
        try:
            value = json.loads(arguments)
            style = rng.choice([{"sort_keys": True}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])
            written = json.dumps(value, **style)
            written.encode()
        except (ValueError, TypeError):
            return call
        if arguments_of(written) != arguments_of(arguments):  # a number that Python cannot keep
            return call
        return {**call, "function": {**call["function"], "arguments": written}}

    return {**message, "tool_calls": list(map(one, message["tool_calls"]))} if message.get("tool_calls") else message


def silent(message: Message, _: random.Random) -> Message:
    """Without the reasoning in its own member."""
    return {name: value for name, value in message.items() if name not in {"reasoning", "reasoning_content"}}


def renamed_member(message: Message, _: random.Random) -> Message:
    if not message.get("reasoning"):
        return message
    other = silent(message, _)
    return {**other, "reasoning_content": message["reasoning"]}


def inline(message: Message, _: random.Random) -> Message:
    """The reasoning moved to the beginning of the text."""
    thought = message.get("reasoning")
    content = message.get("content")
    if not thought or "</think>" in thought or not (content is None or isinstance(content, str)) or "<think>" in (content or ""):
        return message
    return {**silent(message, _), "content": f"<think>\n{thought}\n</think>\n\n{content or ''}"}


HARMLESS: dict[str, Callable[[Message, random.Random], Message]] = {
    "trimmed": trimmed,
    "padded": padded,
    "blank": blank,
    "in parts": in_parts,
    "rewritten JSON": rewritten_json,
    "silent": silent,
    "renamed member": renamed_member,
    "inline": inline,
}
"""Changes that a canonical rule of docs/rules.md normalises: the reply stays the same."""


# --- what a harness understood of a reply --------------------------------------------------------------------------


def with_mended_names(message: Message, tools: Collection[str]) -> Message:
    """Each call by the name of the tool that it differs from in case alone."""
    known = {name.lower(): name for name in tools}

    def mended(call: Message) -> Message:
        name = call["function"]["name"]
        return {**call, "function": {**call["function"], "name": name if name in tools else known.get(name.lower(), name)}}

    return {**message, "tool_calls": list(map(mended, message["tool_calls"]))} if message.get("tool_calls") else message


def without_repeated_calls(message: Message, _: Collection[str]) -> Message:
    """Of calls with the same name and arguments only the first."""
    once = {(call["function"]["name"], call["function"]["arguments"]): call for call in reversed(message.get("tool_calls") or ())}
    calls = [call for call in message.get("tool_calls") or () if call in once.values()]
    return {**message, "tool_calls": calls} if calls else message


def without_text(message: Message, _: Collection[str]) -> Message:
    """Without the text beside calls."""
    return {**message, "content": None} if message.get("tool_calls") else message


UNDERSTOOD: dict[str, tuple[Callable[[Message, Collection[str]], Message], ...]] = {
    "hermes": (with_mended_names, without_repeated_calls),
    "opencode": (with_mended_names,),
    "crewai": (without_text,),
}
"""Adapter → what that harness does to a reply. Arguments: the message, and the names of the tools in the request."""
BY_THEMSELVES = frozenset({"crewai"})
"""Those whose changes leave no doubt which reply it was, also without an adapter: all calls come back verbatim, under their ids."""


def with_objects_as_arguments(message: Message, _: Collection[str]) -> Message:
    """Arguments that are not a JSON object as an empty one (Qwen Code, Kimi Code, Crush)."""

    def one(call: Message) -> Message:
        arguments = call["function"]["arguments"]
        return call if arguments_of(arguments).startswith("{") else {**call, "function": {**call["function"], "arguments": "{}"}}

    return {**message, "tool_calls": list(map(one, message["tool_calls"]))} if message.get("tool_calls") else message


def closed(text: str) -> str:
    """Arguments that were cut off, without their incomplete end, and closed; others as they are."""
    for end in range(len(text), 0, -1) if arguments_of(text).startswith("no JSON") else ():
        completed = text[:end] + _closing(text[:end])
        if arguments_of(completed).startswith("{"):
            return completed
    return text


def _closing(text: str) -> str:
    """What closes the open string, lists and objects of a text."""
    quote, closing = "", ""
    for part in re.finditer(r'"(?:[^"\\]|\\.)*("?)|[][{}]', text, re.DOTALL):
        quote = '"' if part[0].startswith('"') and not part[1] else ""
        closing = closing[1:] if part[0] in "}]" else {"{": "}", "[": "]"}.get(part[0], "") + closing
    return quote + closing


def with_closed_arguments(message: Message, _: Collection[str]) -> Message:
    """Arguments that were cut off, closed (Pi, LangChain, Qwen Code)."""

    def one(call: Message) -> Message:
        return {**call, "function": {**call["function"], "arguments": closed(call["function"]["arguments"])}}

    return {**message, "tool_calls": list(map(one, message["tool_calls"]))} if message.get("tool_calls") else message


def understood_forms(reply: Message) -> list[Message]:
    """What harnesses may make of a reply, by one or several changes, with tools named in lower case: CrewAI drops texts and mends names."""
    tools = [call["function"]["name"].lower() for call in reply.get("tool_calls") or ()]
    forms = [reply]
    for change in (with_mended_names, without_repeated_calls, without_text, with_closed_arguments, with_objects_as_arguments):
        forms += [change(form, tools) for form in forms]
    return forms[1:]


def bare(name: str) -> str:
    """The letters and digits of an id."""
    return re.sub(r"[^A-Za-z0-9]", "", name)

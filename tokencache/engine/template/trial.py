"""The trial: does the local tokenizer render as the engine does?

Asked once per model, on a table of conversations with all that small renderings can hold, under the model's plain
arguments and one set of template arguments; the engine's `/tokenize` is right by definition. Whether the template takes
content in parts is not read off the template, as vLLM does it (a server may be told otherwise), but tried both ways.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.template.local import LocalRenderer
from tokencache.engine.template.renderer import Renderer, RenderError, TemplateRefusedError

log = logging.getLogger(__name__)


class TrialConversation(NamedTuple):
    """A conversation of the table."""

    messages: list[dict[str, Any]]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never changed
    tools: list[dict[str, Any]] | None = None


def _parts(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def _calls(content: str | None, *arguments: str) -> dict[str, Any]:
    made = [{"id": f"call_{i}", "type": "function", "function": {"name": f"f{i}", "arguments": given}} for i, given in enumerate(arguments)]
    return {"role": "assistant", "content": content, "tool_calls": made}


def _result(n: int, content: Any = "done\n") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{n}", "content": content}


_SYSTEM = {"role": "system", "content": " Be terse.\n"}
_ASK = {"role": "user", "content": "  What is it?\n\n"}
_SAID = {"role": "assistant", "content": "\nIt is what it is. "}
_CALL = _calls(None, '{"a": "é <b> \\u2603", "n": 1e5, "l": [1, 2.0, null, true], "o": {}}')
_TOOL = {
    "type": "function",
    "function": {"description": "Does <f>.", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}, "name": "f0"},
}
_SCRIPTS = (
    "naïve café \N{HOT BEVERAGE} \U0001f469\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d\uff0c\u4e16\u754c\u3002 \uff21\uff22 "
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694 "
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 e\u0301 "
    "\u00a0\u200b\ufeff \ufb01 \u00df \u0130\r\n"
    "\tdef f(x):\n\t\treturn x**2  # 3.14159, 1234567890, 0x1F\n\n\n        indented    ...   \n'll don't WE'VE $%^&*()_+{}|:\"<>? \\n"
    "\x07\ufffd\n aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa "
    "------------------------------ https://example.org/a?b=c&d=%20#e 2026-01-31T23:59:59Z"
)
_MARKUP = (
    "<|im_start|>user\n<|im_end|> <tool_call></tool_call><think>\nno\n</think> <tool_response> [INST] </s><s> <|eot_id|> <|user|> "
    "<|end|><|call|> <start_of_turn> <\uff5cUser\uff5c> <|endoftext|> <unk> [TOOL_CALLS] <|python_tag|>"
)

TABLE: dict[str, TrialConversation] = {
    "plain": TrialConversation([_ASK]),
    "system": TrialConversation([_SYSTEM, _ASK]),
    "multi-turn": TrialConversation([_SYSTEM, _ASK, _SAID, {"role": "user", "content": "And?"}, _SAID, _ASK]),
    "two users": TrialConversation([_ASK, _SAID, _ASK, _ASK]),
    "empty texts": TrialConversation([_ASK, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}]),
    "tool call and result": TrialConversation([_ASK, _CALL, _result(0)]),
    "tools offered": TrialConversation([_SYSTEM, _ASK, _CALL, _result(0)], tools=[_TOOL]),
    "text and call": TrialConversation([_ASK, _calls("I look.\n", "{}"), _result(0), _SAID, _ASK]),
    "parallel calls": TrialConversation([_ASK, _calls("", '{"a": "b"}', '{"n": 2}'), _result(0), _result(1, '{"ok": true}')]),
    "a second round": TrialConversation([_ASK, _CALL, _result(0), _calls("", '{"a":"b"}'), _result(0)]),
    "result and user": TrialConversation([_ASK, _CALL, _result(0), _ASK]),
    "reasoning": TrialConversation([_ASK, {**_CALL, "reasoning": "\nHm.\n"}, _result(0)]),
    "old reasoning": TrialConversation([_ASK, {**_SAID, "reasoning_content": "Hm."}, _ASK]),
    "inline thinking": TrialConversation([_ASK, {**_SAID, "content": "<think>\nHm.\n</think>\n\nIt is."}, _ASK]),
    "unicode and code": TrialConversation([{"role": "user", "content": _SCRIPTS}]),
    "unicode in a result": TrialConversation([_ASK, _CALL, _result(0, _SCRIPTS)]),
    "markup": TrialConversation([{"role": "user", "content": _MARKUP}]),
    "markup in a result": TrialConversation([_ASK, _CALL, _result(0, _MARKUP)]),
    "parts: user": TrialConversation([_parts("user", "one ", " two", "")]),
    "parts: system": TrialConversation([_parts("system", "one", "two"), _parts("user", "three", "four")]),
    "parts: assistant": TrialConversation([_ASK, _parts("assistant", "one", "two"), _ASK]),
    "parts: result": TrialConversation([_ASK, _CALL, _result(0, _parts("tool", "one", "two")["content"])]),
    "a later system message": TrialConversation([_SYSTEM, _ASK, _SAID, _SYSTEM, _ASK]),
    "developer": TrialConversation([{**_SYSTEM, "role": "developer"}, _ASK]),
    "developer and system": TrialConversation([{**_SYSTEM, "role": "developer"}, _ASK, _SAID, _SYSTEM, _ASK]),
    "template arguments": TrialConversation([_SYSTEM, _ASK], {"enable_thinking": False, "reasoning_effort": "low", "thinking": False}),
}
"""What both are asked to render, by name. Conversations that the engine refuses say nothing, and are left out."""


class _Case(NamedTuple):
    name: str
    messages: list[bytes]
    args: RenderArgs
    right: bytes


async def tried(local: LocalRenderer, engine: Renderer, model: str) -> LocalRenderer | None:
    """Return the local renderer that agrees with the engine on every conversation of the table, or none: the log says why."""
    try:
        cases = [case for name, talk in TABLE.items() if (case := await _case(name, talk, engine, model)) is not None]
    except RenderError as why:
        log.warning("the local tokenizer %s is not used for %s: it could not be compared: %s", local.path, model or "?", why)
        return None
    furthest: tuple[int, str] = (-1, "the engine renders nothing")
    for way in (local, local.in_parts()):
        found = await _first_difference(way, cases, model)
        if found is None and cases:
            log.info("the local tokenizer %s renders %d conversations as the engine does for %s", local.path, len(cases), model or "?")
            return way
        furthest = max(furthest, found or furthest, key=lambda place: place[0])
    log.warning("the local tokenizer %s is NOT used for %s, but /tokenize: they first differ in %s", local.path, model or "?", furthest[1])
    return None


async def _case(name: str, talk: TrialConversation, engine: Renderer, model: str) -> _Case | None:
    tools = msgspec.Raw(msgspec.json.encode(talk.tools)) if talk.tools else None
    args = RenderArgs(b"", b"", {}, {}, talk.kwargs, tools)
    messages = [msgspec.json.encode(message) for message in talk.messages]
    try:
        return _Case(name, messages, args, await engine.render(model, messages, args, generation=True))
    except TemplateRefusedError:
        return None


async def _first_difference(local: Renderer, cases: Sequence[_Case], model: str) -> tuple[int, str] | None:
    for n, case in enumerate(cases):
        try:
            shown = await local.render(model, case.messages, case.args, generation=True)
        except RenderError as why:
            return n, f"'{case.name}': refused here ({why})"
        if shown != case.right:
            at = ids.common_head(shown, case.right)
            here, there = (ids.unpack(ids.tail(both, at))[:4] for both in (shown, case.right))
            return n, f"'{case.name}' at token {at}: {here} here, {there} there"
    return None

"""Checks on sample conversations that two ways to render give the same ids.

**Chat completions and `/tokenize`.** `/tokenize` does not accept every member that shapes a chat prompt (vLLM 0.32: `reasoning_effort` and
`documents` must be put into the template arguments; `tool_choice: "none"` hides the tools on some servers; gpt-oss is rendered by Harmony
in chat completions and by its Hugging Face template in `/tokenize`). So before the proxy uses tails with a new set of template arguments,
`chat_agrees` sends two small conversations with those arguments to both, and compares the ids that the engine reports. One is a single
question. The other is an episode with a call and its result, where Harmony and the template differ (one writes the result unchanged, the
other as a JSON string). A conversation that `/tokenize` refuses cannot have a tail, so it counts as agreement, except for the question.

**The local tokenizer and `/tokenize`.** `agreeing_local` compares them once per model, on samples of everything that small renderings can
contain, with plain arguments and with one set of template arguments. `/tokenize` is the reference. vLLM reads from the template whether it
accepts content in parts, but a server can be configured otherwise. So this module tries both.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.template.boundary import ASK
from tokencache.engine.template.local import LocalRenderer
from tokencache.engine.template.renderer import REFUSALS, Renderer, RenderError, TemplateRefusedError
from tokencache.errors import EngineError, passing_cause

log = logging.getLogger(__name__)

Raw = msgspec.Raw
ChatPromptIds = Callable[[dict[str, Any]], Awaitable[bytes | None]]
"""Sends a chat request to the engine and returns the packed prompt ids that the engine reports; `None` if it reports none.

Raises `EngineError` if the engine cannot be reached or refuses the request.
"""

TOOL = Raw(
    b'[{"type":"function","function":{"name":"f","description":"d",'
    b'"parameters":{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}}}]'
)
EPISODE = (
    ASK,
    (
        b'{"role":"assistant","content":null,"tool_calls":'
        b'[{"id":"call_0","type":"function","function":{"name":"f","arguments":"{\\"a\\": \\"b\\"}"}}]}'
    ),
    b'{"role":"tool","tool_call_id":"call_0","content":"\\"1\\"\\n2"}',
    b'{"role":"assistant","content":"."}',
    ASK,
)


async def chat_agrees(chat_prompt_ids: ChatPromptIds, renderer: Renderer, model: str, args: RenderArgs) -> bool | None:
    """Compare chat completions and `/tokenize` on small conversations under `args`.

    Returns:
        Whether they give the same ids. Also false if `/tokenize` refuses the single question, or if chat refuses what `/tokenize` renders.
        `None` if the engine gave no usable answer, or renders differently than a moment ago: a template may write the time.

    Raises:
        EngineError: the engine cannot be reached, or cannot answer now.
    """
    try:
        if not (alike := await _chat_renders_alike(chat_prompt_ids, renderer, model, args, [ASK])):
            return alike
        try:
            return await _chat_renders_alike(chat_prompt_ids, renderer, model, args, EPISODE)
        except TemplateRefusedError:
            return True
    except TemplateRefusedError:
        return False
    except RenderError as why:
        if (temporary := passing_cause(why)) is not None:
            raise temporary from why
        return None
    except EngineError as why:
        if why.passing:
            raise
        return False if why.status in REFUSALS else None


async def _chat_renders_alike(
    chat_prompt_ids: ChatPromptIds, renderer: Renderer, model: str, args: RenderArgs, messages: Sequence[bytes]
) -> bool | None:
    offered = msgspec.structs.replace(args, tools=TOOL) if args.tools is not None else args
    render = partial(renderer.render, model, messages, offered, generation=True)
    rendered = await render()
    body: dict[str, Any] = {**args.members, **args.chat, "model": model, "messages": Raw(b"[" + b",".join(messages) + b"]")}
    if offered.tools is not None:
        body["tools"] = offered.tools
    used = await chat_prompt_ids(body)
    if used == rendered:
        return True
    return False if used is not None and await render() == rendered else None


class Sample(NamedTuple):
    """A sample conversation."""

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
_ANSWER = {"role": "assistant", "content": "\nIt is what it is. "}
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

SAMPLES: dict[str, Sample] = {
    "plain": Sample([_ASK]),
    "system": Sample([_SYSTEM, _ASK]),
    "multi-turn": Sample([_SYSTEM, _ASK, _ANSWER, {"role": "user", "content": "And?"}, _ANSWER, _ASK]),
    "two users": Sample([_ASK, _ANSWER, _ASK, _ASK]),
    "empty texts": Sample([_ASK, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}]),
    "tool call and result": Sample([_ASK, _CALL, _result(0)]),
    "tools offered": Sample([_SYSTEM, _ASK, _CALL, _result(0)], tools=[_TOOL]),
    "text and call": Sample([_ASK, _calls("I look.\n", "{}"), _result(0), _ANSWER, _ASK]),
    "parallel calls": Sample([_ASK, _calls("", '{"a": "b"}', '{"n": 2}'), _result(0), _result(1, '{"ok": true}')]),
    "a second round": Sample([_ASK, _CALL, _result(0), _calls("", '{"a":"b"}'), _result(0)]),
    "result and user": Sample([_ASK, _CALL, _result(0), _ASK]),
    "reasoning": Sample([_ASK, {**_CALL, "reasoning": "\nHm.\n"}, _result(0)]),
    "old reasoning": Sample([_ASK, {**_ANSWER, "reasoning_content": "Hm."}, _ASK]),
    "inline thinking": Sample([_ASK, {**_ANSWER, "content": "<think>\nHm.\n</think>\n\nIt is."}, _ASK]),
    "unicode and code": Sample([{"role": "user", "content": _SCRIPTS}]),
    "unicode in a result": Sample([_ASK, _CALL, _result(0, _SCRIPTS)]),
    "markup": Sample([{"role": "user", "content": _MARKUP}]),
    "markup in a result": Sample([_ASK, _CALL, _result(0, _MARKUP)]),
    "parts: user": Sample([_parts("user", "one ", " two", "")]),
    "parts: system": Sample([_parts("system", "one", "two"), _parts("user", "three", "four")]),
    "parts: assistant": Sample([_ASK, _parts("assistant", "one", "two"), _ASK]),
    "parts: result": Sample([_ASK, _CALL, _result(0, _parts("tool", "one", "two")["content"])]),
    "a later system message": Sample([_SYSTEM, _ASK, _ANSWER, _SYSTEM, _ASK]),
    "developer": Sample([{**_SYSTEM, "role": "developer"}, _ASK]),
    "developer and system": Sample([{**_SYSTEM, "role": "developer"}, _ASK, _ANSWER, _SYSTEM, _ASK]),
    "template arguments": Sample([_SYSTEM, _ASK], {"enable_thinking": False, "reasoning_effort": "low", "thinking": False}),
}
"""Conversations, by name, that the local tokenizer must render like the engine. Those that the engine refuses are skipped."""


class _Case(NamedTuple):
    name: str
    messages: list[bytes]
    args: RenderArgs
    expected: bytes


async def agreeing_local(local: LocalRenderer, engine: Renderer, model: str) -> LocalRenderer | None:
    """Return the local renderer, with or without parts, that agrees with the engine on every sample; `None` if neither does."""
    try:
        cases = [case for name, sample in SAMPLES.items() if (case := await _case(name, sample, engine, model)) is not None]
    except RenderError as why:
        log.warning("the local tokenizer %s is not used for %s: it could not be compared: %s", local.path, model or "?", why)
        return None
    furthest: tuple[int, str] = (-1, "the engine renders nothing")
    for variant in (local, local.in_parts()):
        found = await _first_difference(variant, cases, model)
        if found is None and cases:
            log.info("the local tokenizer %s renders %d conversations as the engine does for %s", local.path, len(cases), model or "?")
            return variant
        furthest = max(furthest, found or furthest, key=lambda place: place[0])
    log.warning("the local tokenizer %s is NOT used for %s; /tokenize is. They first differ in %s", local.path, model or "?", furthest[1])
    return None


async def _case(name: str, sample: Sample, engine: Renderer, model: str) -> _Case | None:
    tools = Raw(msgspec.json.encode(sample.tools)) if sample.tools else None
    args = RenderArgs(b"", b"", {}, {}, sample.kwargs, tools)
    messages = [msgspec.json.encode(message) for message in sample.messages]
    try:
        return _Case(name, messages, args, await engine.render(model, messages, args, generation=True))
    except TemplateRefusedError:
        return None


async def _first_difference(local: Renderer, cases: Sequence[_Case], model: str) -> tuple[int, str] | None:
    for n, case in enumerate(cases):
        try:
            rendered = await local.render(model, case.messages, case.args, generation=True)
        except RenderError as why:
            return n, f"'{case.name}': refused here ({why})"
        if rendered != case.expected:
            at = ids.common_head(rendered, case.expected)
            here, there = (ids.unpack(ids.tail(both, at))[:4] for both in (rendered, case.expected))
            return n, f"'{case.name}' at token {at}: {here} here, {there} there"
    return None

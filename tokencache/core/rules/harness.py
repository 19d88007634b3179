r"""Lists the rules of single harnesses, with a function for each change that a harness makes to a reply.

The rules are exact and never accept similar values. Where a harness changes a *text*, the function computes the echoed text from the served
text. So the proxy knows the digest of the echo when it records the reply, and finds the turn by it. Where a harness changes the *arguments*
of a call, the function compares them: as a whole (`explains_call`), or member by member (`explains_member`). So several rules may each
explain one member of a call. Where a harness understood other *calls* than it was served (their names, their number), the function computes
the calls that it understood (`rewrites_calls`); other rules may then explain their arguments.

This module parses with `json`, as harnesses may: it accepts lone surrogates and NaN, which msgspec rejects.
"""

import json
import re
from collections.abc import Callable, Container
from operator import attrgetter
from typing import Any

import msgspec

from tokencache.core.messages import BLANK, Message, ToolCall, canonical_arguments, canonical_json
from tokencache.core.rules.base import Rule
from tokencache.core.rules.truncated_json import NotTruncatedJsonError, complete_json

_CAPTURED = "recorded traffic"

_MARKUP = re.compile(r"<(think|tool_call)>")
_SECRET = re.compile(
    r"(?<![\w-])(?:(?:sk|tvly|pypi|fc|hsk)-[\w-]{10,}|(?:gh[opusr]|github_pat|hf|npm|gsk|r8|sk|exa|dop_v1)_\w{10,}|pplx-[A-Za-z0-9]{10,}"
    r"|xox[baprs]-[A-Za-z0-9-]{10,}|AIza[\w-]{30,}|AKIA[A-Z0-9]{16}|SG\.[\w-]{10,})(?![\w-])",
    re.ASCII,
)
_SHORT_SECRET = 18
_MARKER = re.compile(r"<(?=\|[^\s<>|\"\u200b-\u200d\u2060\ufeff]{1,64}\|>)")
_CD = re.compile(r"""cd (?:'[^']*'|"[^"$`\\]*"|(?:[^\s'"\\;&|<>()$`]|\\.)++) && """)
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_OPENHANDS = "_openhands_malformed_tool_call"
_ALIASES = {
    **dict.fromkeys(("bash", "command", "execute", "execute_bash"), "terminal"),
    **dict.fromkeys(("str_replace", "str_replace_editor"), "file_editor"),
}
"""Names of tools that OpenHands understands as another tool's, with unchanged arguments."""


def parse_object(arguments: str, default: Any = None) -> Any:
    """Parse the JSON text of an object; `""` is an empty object. Returns `default` if the text is not an object."""
    try:
        value = json.loads(arguments) if arguments.strip(BLANK) else {}
    except (ValueError, RecursionError):
        return default
    return value if isinstance(value, dict) else default


# Texts.


def _remove_markup(text: str) -> str:
    kept, at, unclosed = [], 0, set[str]()
    for opening in _MARKUP.finditer(text):
        closing = opening[0].replace("<", "</")
        if opening.start() < at or closing in unclosed:
            continue
        end = text.find(closing, opening.end())
        if end < 0:
            unclosed.add(closing)  # searched for only once
        else:
            kept.append(text[at : opening.start()])
            at = end + len(closing)
    return "".join([*kept, text[at:]]).strip(BLANK)


def _mask_secrets(text: str) -> str:
    return _SECRET.sub(lambda m: "***" if len(m[0]) < _SHORT_SECRET else f"{m[0][:6]}...{m[0][-4:]}", text)


def _break_markers(text: str) -> str:
    return _MARKER.sub("<\u200d", text)


def _is_json_of(text: str, value: Any, *, strict: bool = True) -> bool:
    """Whether a text is the JSON of a value; not `strict`: strings may have control characters."""
    try:
        return canonical_json(json.loads(text, strict=strict)) == canonical_json(value)
    except (ValueError, RecursionError):
        return False


# Whole replies.


def _marker(words: str) -> Callable[[Message], Message | None]:
    """Write these words in place of a reply without text and calls."""
    return lambda served: None if served.text or served.calls else msgspec.structs.replace(served, content=words)


def _calls_as_text(served: Message) -> Message | None:
    """Write the calls as smolagents does, including their ids, by which it orders them."""
    if not served.calls:
        return None
    ordered = sorted(served.calls, key=attrgetter("id"))
    functions = [{"name": call.name, "arguments": parse_object(call.arguments, {})} for call in ordered]
    calls = [{"id": call.id, "type": "function", "function": f} for call, f in zip(ordered, functions, strict=True)]
    return msgspec.structs.replace(served, content=f"{served.text}\nCalling tools:\n{calls}", calls=())


def _text_dropped(served: Message) -> Message | None:
    return msgspec.structs.replace(served, content=None) if served.text and served.calls else None


# Calls as they were understood.


def _lower_names(calls: tuple[ToolCall, ...], tools: Container[str]) -> tuple[ToolCall, ...]:
    return tuple(_renamed(call, call.name.lower(), tools) for call in calls)


def _aliased_names(calls: tuple[ToolCall, ...], tools: Container[str]) -> tuple[ToolCall, ...]:
    return tuple(_renamed(call, _ALIASES.get(call.name, call.name), tools) for call in calls)


def _renamed(call: ToolCall, name: str, tools: Container[str]) -> ToolCall:
    """Return the call with this name, if a tool has it and no tool has the name of the call."""
    mended = name != call.name and name in tools and call.name not in tools
    return msgspec.structs.replace(call, name=name) if mended else call


def _without_repeated(calls: tuple[ToolCall, ...], _: Container[str]) -> tuple[ToolCall, ...]:
    first: dict[tuple[str, str], ToolCall] = {}
    for call in calls:
        first.setdefault((call.name, call.arguments), call)
    return tuple(first.values())


# Arguments as a whole.


def _is_broken(ours: ToolCall, theirs: ToolCall) -> bool:
    """Whether the served arguments are not a JSON object, and the echoed call has the same name."""
    return ours.name == theirs.name and bool(ours.arguments.strip(BLANK)) and parse_object(ours.arguments) is None


def _unparsed(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    """`len` is the length of a JavaScript string, in UTF-16 units."""
    length = len(ours.arguments.encode("utf-16-le", "surrogatepass")) // 2
    return _is_broken(ours, theirs) and value == {"__unparsedToolInput": {"raw": ours.arguments, "len": length}}


def _repaired(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    if not _is_broken(ours, theirs):
        return False
    try:
        return canonical_json(complete_json(ours.arguments)) == canonical_json(value)
    except NotTruncatedJsonError:
        return False


def _emptied(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    return _is_broken(ours, theirs) and value == {}


def _null_emptied(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    return _emptied(ours, theirs, value) and ours.arguments.strip(BLANK) == "null"


def _wrapped(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    return _is_broken(ours, theirs) and value.keys() == {"value"} and _is_json_of(ours.arguments, value["value"])


def _invalid_json(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    return _is_broken(ours, theirs) and value == {"INVALID_JSON": ours.arguments}


def _malformed(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    """OpenHands also treats empty arguments as malformed."""
    empty = not ours.arguments.strip(BLANK)
    broken = ours.name == theirs.name and (empty or parse_object(ours.arguments) is None)
    return broken and value.keys() == {_OPENHANDS, "error"} and value[_OPENHANDS] is True and isinstance(value["error"], str)


def _invalid_tool(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    """Replaces the name of a call that was not understood."""
    return theirs.name == "invalid" and value.keys() == {"tool", "error"} and value["tool"] == ours.name and isinstance(value["error"], str)


def _replaced_name(ours: ToolCall, theirs: ToolCall, _: dict[str, Any]) -> bool:
    same = canonical_arguments(ours.arguments) == canonical_arguments(theirs.arguments)
    return theirs.name == "INVALID_TOOL_NAME" and _TOOL_NAME.fullmatch(ours.name) is None and same


def _broken_markers(ours: ToolCall, theirs: ToolCall, _: dict[str, Any]) -> bool:
    broken = _break_markers(ours.arguments)
    return ours.name == theirs.name and broken != ours.arguments and canonical_arguments(broken) == canonical_arguments(theirs.arguments)


# Single members of arguments.


def _cd_prefix(tool: str, member: str, ours: Any, theirs: Any) -> bool:
    if (tool, member) != ("Bash", "command") or not isinstance(ours, str):
        return False
    found = _CD.match(ours)
    return found is not None and ours[found.end() :] == theirs


def _coerced(_: str, __: str, ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, str):
        return False
    if isinstance(theirs, bool):
        return ours == ("true" if theirs else "false")
    if not isinstance(theirs, int | float) or _NUMBER.fullmatch(ours) is None:
        return False
    try:
        return canonical_json(json.loads(ours)) == canonical_json(theirs)
    except ValueError:  # an integer of thousands of digits, which Python does not convert
        return False


def _trailing_blanks(_: str, member: str, ours: Any, theirs: Any) -> bool:
    return member == "content" and isinstance(ours, str) and "\n".join(line.rstrip(" \t") for line in ours.split("\n")) == theirs


def _null_dropped(_: str, __: str, ours: Any, theirs: Any) -> bool:
    return ours is None and theirs is msgspec.UNSET


def _decoded(_: str, __: str, ours: Any, theirs: Any) -> bool:
    return isinstance(ours, str) and isinstance(theirs, list | dict) and _is_json_of(ours, theirs, strict=False)


def _default_inserted(tool: str, member: str, ours: Any, theirs: Any) -> bool:
    return ours is msgspec.UNSET and (tool, member) == ("Edit", "replace_all") and theirs is False


HARNESS: tuple[Rule, ...] = (
    Rule(
        name="cd-prefix",
        kind="harness",
        verdict="rewritten",
        harnesses=("Claude Code",),
        what="`Bash.command`: a leading `cd <one shell word> && ` is removed",
        source=f"{_CAPTURED}, `input-rewrite`",
        explains_member=_cd_prefix,
    ),
    Rule(
        name="coerced-values",
        kind="harness",
        verdict="rewritten",
        harnesses=("Claude Code",),
        what='a member `"5000"` is returned as `5000`, `"true"` as `true`, `"false"` as `false`',
        source=f"{_CAPTURED}, `input-rewrite`: only some members are coerced",
        explains_member=_coerced,
    ),
    Rule(
        name="trailing-blanks",
        kind="harness",
        verdict="rewritten",
        harnesses=("Claude Code",),
        what="members named `content`: blanks and tabs at the ends of lines are removed",
        source=f"{_CAPTURED}, `input-rewrite` (`Write.content`)",
        explains_member=_trailing_blanks,
    ),
    Rule(
        name="default-inserted",
        kind="harness",
        verdict="rewritten",
        harnesses=("Claude Code",),
        what="`Edit` got the member `replace_all: false`",
        source=f"{_CAPTURED}, `input-rewrite`",
        explains_member=_default_inserted,
    ),
    Rule(
        name="null-dropped",
        kind="harness",
        verdict="rewritten",
        harnesses=("OpenHands",),
        what="members `null` are not returned",
        source=f"source: OpenHands SDK 1.58.0 `agent/utils.py`; {_CAPTURED}",
        explains_member=_null_dropped,
    ),
    Rule(
        name="string-decoded",
        kind="harness",
        verdict="rewritten",
        harnesses=("OpenHands",),
        what="a member that is the JSON text of a list or an object is returned as that list or object",
        source=f"source: OpenHands SDK 1.58.0 `agent/utils.py`; {_CAPTURED}",
        explains_member=_decoded,
    ),
    Rule(
        name="unparsed-input",
        kind="harness",
        verdict="rewritten",
        harnesses=("Claude Code",),
        what='arguments that are not an object are returned as `{"__unparsedToolInput": {"raw": …, "len": …}}`; `raw` is the served text',
        source=f"{_CAPTURED}, malformed calls",
        explains_call=_unparsed,
    ),
    Rule(
        name="secrets-masked",
        kind="harness",
        verdict="rewritten",
        harnesses=("Hermes",),
        what="credentials with a known prefix are masked: six characters, `...`, four characters; under 18 characters `***`",
        source="source: Hermes 0.19.0 `agent/redact.py`; recorded traffic (`sk-pro...abcd`)",
        part="text",
        rewrites_text=_mask_secrets,
        order=2,
    ),
    Rule(
        name="markup-removed",
        kind="harness",
        verdict="rewritten",
        harnesses=("Hermes",),
        what="`<think>…</think>` and `<tool_call>…</tool_call>` within a text are removed",
        source="source: Hermes 0.19.0 `agent_runtime_helpers.py` (`strip_think_blocks`); recorded traffic",
        part="text",
        rewrites_text=_remove_markup,
        order=1,
    ),
    Rule(
        name="empty-marker",
        kind="harness",
        verdict="rewritten",
        harnesses=("Hermes",),
        what="a reply without text and calls is returned as `(empty)`; recognized only at its own position",
        source=f"{_CAPTURED}, thinking-only answers",
        part="text",
        rewrites_reply=_marker("(empty)"),
        order=1,
    ),
    Rule(
        name="blank-marked",
        kind="harness",
        verdict="rewritten",
        harnesses=("Strands",),
        what="a reply whose text is blank, without calls, is returned as `[blank text]`; recognized only at its own position",
        source=f"source: Strands 1.62.0 `event_loop/streaming.py`; {_CAPTURED}",
        part="text",
        rewrites_reply=_marker("[blank text]"),
        order=1,
    ),
    Rule(
        name="name-lowered",
        kind="harness",
        verdict="rewritten",
        harnesses=("OpenCode", "Kilo", "Hermes", "CrewAI"),
        what="a call's name is returned in lower case, if the request has a tool of that name and none of the served name",
        source="source: OpenCode 1.18.33 `experimental_repairToolCall`, Hermes 0.19.0 `repair_tool_call`, CrewAI 1.15.30 "
        f"`sanitize_tool_name`; {_CAPTURED}",
        rewrites_calls=_lower_names,
        order=1,
    ),
    Rule(
        name="name-aliased",
        kind="harness",
        verdict="rewritten",
        harnesses=("OpenHands",),
        what="calls of `bash`, `command`, `execute` and `execute_bash` are returned as of `terminal`, those of `str_replace` and "
        "`str_replace_editor` as of `file_editor`, if the request has that tool and none of the served name",
        source=f"source: OpenHands SDK 1.58.0 `agent/utils.py`; {_CAPTURED}",
        rewrites_calls=_aliased_names,
        order=1,
    ),
    Rule(
        name="repeated-dropped",
        kind="harness",
        verdict="rewritten",
        harnesses=("Hermes",),
        what="of calls with the same name and the same text of arguments only the first is returned",
        source=f"source: Hermes 0.19.0 `_deduplicate_tool_calls`; {_CAPTURED}",
        rewrites_calls=_without_repeated,
        order=2,
    ),
    Rule(
        name="invalid-tool",
        kind="harness",
        verdict="rewritten",
        harnesses=("OpenCode",),
        what='a call is renamed to `invalid`, its arguments are `{"tool": <its name>, "error": …}`; the id is kept',
        source=f"{_CAPTURED}, malformed calls and unknown tools",
        explains_call=_invalid_tool,
        order=1,
    ),
    Rule(
        name="name-replaced",
        kind="harness",
        verdict="rewritten",
        harnesses=("Strands",),
        what="a call's name with other characters than letters, digits, `_` and `-`, or more than 64, is returned as `INVALID_TOOL_NAME`",
        source=f"source: Strands 1.62.0 `tools/tools.py`; {_CAPTURED}",
        explains_call=_replaced_name,
    ),
    Rule(
        name="value-wrapped",
        kind="harness",
        verdict="rewritten",
        harnesses=("OpenCode", "Kilo"),
        what='arguments that are JSON, but not an object, are returned as `{"value": <the served value>}`',
        source=f"{_CAPTURED}, malformed calls",
        explains_call=_wrapped,
    ),
    Rule(
        name="null-emptied",
        kind="harness",
        verdict="rewritten",
        harnesses=("Claude Code",),
        what="arguments `null` are returned as `{}`",
        source=f"{_CAPTURED}, malformed calls",
        explains_call=_null_emptied,
    ),
    Rule(
        name="args-repaired",
        kind="harness",
        verdict="rewritten",
        harnesses=("Pi", "LangChain", "Qwen Code"),
        what="truncated arguments are returned closed: an incomplete end is removed, open strings, lists and objects are closed, "
        "nothing is added",
        source=f"{_CAPTURED}, malformed calls and length stops",
        explains_call=_repaired,
    ),
    Rule(
        name="args-emptied",
        kind="harness",
        verdict="rewritten",
        harnesses=("Kimi Code", "Qwen Code", "Crush", "Strands"),
        what="arguments that are not a JSON object are returned as `{}`",
        source=f"{_CAPTURED} (Kimi Code, Qwen Code), source (Crush 37f36e9, Strands 1.62.0)",
        explains_call=_emptied,
    ),
    Rule(
        name="invalid-json-wrapped",
        kind="harness",
        verdict="rewritten",
        harnesses=("pydantic-ai",),
        what='arguments that are not a JSON object are returned as `{"INVALID_JSON": <the served text>}`',
        source=f"{_CAPTURED}, malformed calls",
        explains_call=_invalid_json,
    ),
    Rule(
        name="malformed-wrapped",
        kind="harness",
        verdict="rewritten",
        harnesses=("OpenHands",),
        what='arguments that are empty or not a JSON object are returned as `{"_openhands_malformed_tool_call": true, "error": …}`',
        source=f"{_CAPTURED}, malformed calls",
        explains_call=_malformed,
    ),
    Rule(
        name="marker-broken",
        kind="harness",
        verdict="rewritten",
        harnesses=("pydantic-ai",),
        what="U+200D is inserted after the `<` of every `<|…|>` in texts and arguments",
        source="source: pydantic-ai 2.68.0 `_special_tokens.py`; recorded traffic",
        part="text",
        rewrites_text=_break_markers,
        explains_call=_broken_markers,
        order=3,
    ),
    Rule(
        name="calls-as-text",
        kind="harness",
        verdict="rewritten",
        harnesses=("smolagents",),
        what="calls are returned within the text, as `Calling tools:` and a Python list, in the order of their ids",
        source="source: smolagents 1.26.0 `agents.py`, `memory.py`; recorded traffic",
        part="text",
        rewrites_reply=_calls_as_text,
        order=4,
    ),
    Rule(
        name="text-dropped",
        kind="harness",
        verdict="rewritten",
        harnesses=("CrewAI",),
        what="the text beside calls is not returned; the calls are, as they were served, and their ids look random",
        source=f"source: CrewAI 1.15.30 `agents/agent_executor.py`; {_CAPTURED}",
        part="text",
        rewrites_reply=_text_dropped,
        verbatim_calls=True,
        without_adapter=True,
    ),
    Rule(
        name="reasoning-emptied",
        kind="harness",
        verdict="rewritten",
        harnesses=("LangChain (responses)",),
        what="the item of a reasoning is returned without content",
        source=f"{_CAPTURED}, responses, streamed",
        part="reasoning",
    ),
)

r"""Rewrites: the vouched rules, as functions. Is the echoed value that very transformation of the served one?

A rule never says "close enough". Where a harness changes a *text*, the rule is the change itself: a function that makes
of the served text the one that comes back (`TEXT`). So what will come back is known when the reply is recorded, and it
is found under its own digest (`expected_rewritings`). Where it changes the *arguments* of a call, the rule compares: the whole of
them (`ARGUMENTS`), or member by member (`MEMBERS`), so that several rules may each explain a member of one call.

`json` reads what harnesses may have read: lone surrogates and NaN, which the strict reader refuses.
"""

import json
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import msgspec

from tokencache.core.messages import BLANK, Message, ToolCall, canonical_arguments, canonical_json
from tokencache.core.repair import NotTruncatedJsonError, complete_json
from tokencache.core.rules import Leniency

Rules = tuple[str, ...]

_MARKUP = re.compile(r"<(think|tool_call)>.*?</\1>", re.DOTALL)
_SECRET = re.compile(
    r"(?<![\w-])(?:(?:sk|tvly|pypi|fc|hsk)-[\w-]{10,}|(?:gh[opusr]|github_pat|hf|npm|gsk|r8|sk|exa|dop_v1)_\w{10,}|pplx-[A-Za-z0-9]{10,}"
    r"|xox[baprs]-[A-Za-z0-9-]{10,}|AIza[\w-]{30,}|AKIA[A-Z0-9]{16}|SG\.[\w-]{10,})(?![\w-])",
    re.ASCII,
)
_SHORT_SECRET = 18
_MARKER = re.compile(r"<(?=\|[^\s<>|\"\u200b-\u200d\u2060\ufeff]{1,64}\|>)")
_CD = re.compile(r"""cd (?:'[^']*'|"[^"$`\\]*"|(?:[^\s'"\\;&|<>()$`]|\\.)+) && """)
_LINE_END = re.compile(r"[ \t]+(?=\n|$)")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_DEFAULTS = {("Edit", "replace_all"): False}
_UNPARSED = "__unparsedToolInput"
_OPENHANDS = "_openhands_malformed_tool_call"


# texts: the change itself


def remove_markup(text: str) -> str:
    """`markup-removed` (Hermes): blocks of markup vanish, then the text is trimmed."""
    return _MARKUP.sub("", text).strip(BLANK)


def mask_secrets(text: str) -> str:
    """`secrets-masked` (Hermes): what looks like a credential keeps six characters and four."""
    return _SECRET.sub(lambda m: "***" if len(m[0]) < _SHORT_SECRET else f"{m[0][:6]}...{m[0][-4:]}", text)


def break_markers(text: str) -> str:
    """`marker-broken` (pydantic-ai): no tokenizer can take `<|…|>` for a special token any more."""
    return _MARKER.sub("<\u200d", text)


def end_code(text: str) -> str:
    """`calls-as-text` (smolagents' CodeAgent): its stop string `</code>` is put back."""
    return text + "</code>" if "<code>" in text and not text.endswith("</code>") else text


TEXT: dict[str, Callable[[str], str]] = {
    "markup-removed": remove_markup,
    "secrets-masked": mask_secrets,
    "marker-broken": break_markers,
    "calls-as-text": end_code,
}
"""In the order in which they are done."""


def rewritings(served: Message, *, among: Leniency | None = None) -> Iterator[tuple[Rules, Message]]:
    """Tell every other way in which the text of a reply may come back, those that take the fewest rules first.

    `among` leaves out what is not allowed there. Calls stay what they are, unless the rule is that they become text.
    """

    def allowed(rule: str) -> bool:
        return among is None or among.allows(rule)

    if not served.text and not served.calls and allowed("empty-marker"):
        yield ("empty-marker",), msgspec.structs.replace(served, content="(empty)")
    if served.calls and allowed("calls-as-text"):
        yield ("calls-as-text",), _calls_as_text(served)
    able = [rule for rule in TEXT if allowed(rule)] if served.text else []
    for n in range(1, len(able) + 1):
        for rules in combinations(able, n):
            text = served.text
            changed = []
            for rule in rules:
                after = TEXT[rule](text)
                changed.append(after != text)
                text = after
            if all(changed):
                yield rules, msgspec.structs.replace(served, content=text)


def expected_rewritings(served: Message, leniency: Leniency) -> list[Message]:
    """Tell how a reply may come back in this session beside as it was served: nothing where nobody vouches for a change."""
    return [message for _, message in rewritings(served, among=leniency)] if leniency.vouched else []


def _calls_as_text(served: Message) -> Message:
    """Write calls as smolagents does, ids included."""
    functions = [{"name": call.name, "arguments": _object(call.arguments, {})} for call in served.calls]
    listed = [{"id": call.id, "type": "function", "function": f} for call, f in zip(served.calls, functions, strict=True)]
    return msgspec.structs.replace(served, content=f"{served.text}\nCalling tools:\n{listed}", calls=())


# arguments as a whole: what was no JSON object


def _unparsed(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    """`unparsed-input` (Claude Code); `len` is that of a JavaScript string, in UTF-16 units."""
    length = len(ours.arguments.encode("utf-16-le", "surrogatepass")) // 2
    return _broken(ours, theirs) and value == {_UNPARSED: {"raw": ours.arguments, "len": length}}


def _repaired(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    """`args-repaired` (Pi, LangChain, Qwen Code)."""
    if not _broken(ours, theirs):
        return False
    try:
        return canonical_json(complete_json(ours.arguments)) == canonical_json(value)
    except NotTruncatedJsonError:
        return False


def _emptied(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    """`args-emptied` (Kimi Code, Crush)."""
    return _broken(ours, theirs) and value == {}


def _invalid_json(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    """`invalid-json-wrapped` (pydantic-ai)."""
    return _broken(ours, theirs) and value == {"INVALID_JSON": ours.arguments}


def _malformed(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    """`malformed-wrapped` (OpenHands), for empty arguments, too."""
    empty = not ours.arguments.strip(BLANK)
    kept = ours.name == theirs.name and (empty or _object(ours.arguments) is None)
    return kept and value.keys() == {_OPENHANDS, "error"} and value[_OPENHANDS] is True and isinstance(value["error"], str)


def _invalid_tool(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    """`invalid-tool` (OpenCode): the only rule under which a name may change."""
    return theirs.name == "invalid" and value.keys() == {"tool", "error"} and value["tool"] == ours.name and isinstance(value["error"], str)


def _markers(ours: ToolCall, theirs: ToolCall, _: dict[str, Any]) -> bool:
    """`marker-broken` (pydantic-ai), wherever in the arguments a marker stands."""
    broken = break_markers(ours.arguments)
    return ours.name == theirs.name and broken != ours.arguments and canonical_arguments(broken) == canonical_arguments(theirs.arguments)


ARGUMENTS: dict[str, Callable[[ToolCall, ToolCall, dict[str, Any]], bool]] = {
    "unparsed-input": _unparsed,
    "args-repaired": _repaired,
    "args-emptied": _emptied,
    "invalid-json-wrapped": _invalid_json,
    "malformed-wrapped": _malformed,
    "invalid-tool": _invalid_tool,
    "marker-broken": _markers,
}


def _broken(ours: ToolCall, theirs: ToolCall) -> bool:
    return ours.name == theirs.name and bool(ours.arguments.strip(BLANK)) and _object(ours.arguments) is None


# arguments by their members


def _cd(tool: str, member: str, ours: Any, theirs: Any) -> bool:
    """`cd-prefix` (Claude Code): one shell word, and nothing before it."""
    if (tool, member) != ("Bash", "command") or not isinstance(ours, str):
        return False
    found = _CD.match(ours)
    return found is not None and ours[found.end() :] == theirs


def _coerced(_: str, __: str, ours: Any, theirs: Any) -> bool:
    """`coerced-values` (Claude Code): the text of a number or of a truth value became one."""
    if not isinstance(ours, str):
        return False
    if isinstance(theirs, bool):
        return ours == ("true" if theirs else "false")
    if not isinstance(theirs, int | float) or _NUMBER.fullmatch(ours) is None:
        return False
    return canonical_json(json.loads(ours)) == canonical_json(theirs)


def _trailing(_: str, member: str, ours: Any, theirs: Any) -> bool:
    """`trailing-blanks` (Claude Code): at the ends of lines; the lines themselves stay."""
    return member == "content" and isinstance(ours, str) and _LINE_END.sub("", ours) == theirs


MEMBERS: dict[str, Callable[[str, str, Any, Any], bool]] = {"cd-prefix": _cd, "coerced-values": _coerced, "trailing-blanks": _trailing}


def explain_call(ours: ToolCall, theirs: ToolCall) -> list[Rules]:
    """Find the sets of rules that each make `theirs` of `ours`, whose arguments or names differ; none if nothing does."""
    value = _object(theirs.arguments)
    if value is None:
        return []
    ways: list[Rules] = [(rule,) for rule, holds in ARGUMENTS.items() if holds(ours, theirs, value)]
    members = _explain_members(ours, value) if ours.name == theirs.name else None
    return [*ways, members] if members else ways


def _explain_members(ours: ToolCall, theirs: dict[str, Any]) -> Rules | None:
    """Explain each member that differs by the one rule that makes it; the others must be the same."""
    mine = _object(ours.arguments)
    if mine is None or mine.keys() - theirs.keys():
        return None
    needed = set()
    for name, value in theirs.items():
        if name not in mine:
            if (ours.name, name) not in _DEFAULTS or value is not _DEFAULTS[ours.name, name]:
                return None
            needed.add("default-inserted")
        elif canonical_json(mine[name]) != canonical_json(value):
            rule = next((rule for rule, holds in MEMBERS.items() if holds(ours.name, name, mine[name], value)), None)
            if rule is None:
                return None
            needed.add(rule)
    return tuple(sorted(needed))


def _object(arguments: str, otherwise: Any = None) -> Any:
    """Read arguments that are the JSON text of an object; `""` is an empty one."""
    try:
        value = json.loads(arguments) if arguments.strip(BLANK) else {}
    except (ValueError, RecursionError):
        return otherwise
    return value if isinstance(value, dict) else otherwise

"""Lists the rules that hold for all harnesses, and the rules of the dialects' codecs.

`core.messages` gives all canonical variants the same digest, and `core.verdict` reports which rules were needed. So these rules have no
functions, except for two forms that only the served reply explains: thinking that was cut off, and arguments of a custom tool without its
text. A dialect's codec leaves out what its rules name.
"""

import json
from typing import Any

import msgspec

from tokencache.core.messages import BLANK, Message, ToolCall, canonical_json
from tokencache.core.rules.base import Rule

_ALL = ("all",)
_CAPTURED = "recorded traffic"

_OPENING, _CLOSING = "<think>", "</think>"


def _thinking_cut_off(served: Message) -> Message | None:
    """Return a reply whose whole text is thinking without an end as one whose reasoning is in its own member."""
    text = (served.content or "").lstrip(BLANK)
    if served.reasoning or not text.startswith(_OPENING) or _CLOSING in text:
        return None
    return msgspec.structs.replace(served, content=None, reasoning=text.removeprefix(_OPENING))


def _served_as_input(ours: ToolCall, theirs: ToolCall, value: dict[str, Any]) -> bool:
    """Whether the echo has, as `input`, the text that a client of Responses gets for these arguments of a custom tool."""
    try:
        read = json.loads(ours.arguments, strict=False)
    except (ValueError, RecursionError):
        read = None
    has_input = isinstance(read, dict) and isinstance(read.get("input"), str)
    if ours.name != theirs.name or (has_input and len(read) > 1):  # a function's harness may drop members, too
        return False
    return canonical_json(value) == canonical_json({"input": read["input"] if has_input else ours.arguments})


CANONICAL: tuple[Rule, ...] = (
    Rule(
        name="content-shape",
        kind="canonical",
        verdict="equivalent",
        harnesses=_ALL,
        what='`null`, `""`, absent, an empty list and blank text are equal; a list of text parts equals its text',
        source=f'{_CAPTURED}: null by agents, LangChain, pydantic-ai, Pi, Kimi Code; `""` by OpenCode, Qwen Code, Hermes',
        part="text",
    ),
    Rule(
        name="whitespace",
        kind="canonical",
        verdict="equivalent",
        harnesses=("Hermes", "Qwen Code", "Gemini CLI", "smolagents", "Crush"),
        what="whitespace (and U+FEFF) around a text or a reasoning, never inside it",
        source=f"{_CAPTURED}: Hermes `str.strip()`; Gemini CLI after `--resume`; Crush `strings.TrimSpace` (source)",
        part="text",
    ),
    Rule(
        name="args-json",
        kind="canonical",
        verdict="equivalent",
        harnesses=("all but Codex, openai-agents and mini-swe-agent",),
        what="arguments by value: key order, spacing, escapes, numbers as doubles, the last duplicate key; "
        '`""` is `{}`, a lone surrogate is U+FFFD',
        source=f"{_CAPTURED}: every JavaScript client writes `10000.0` as `10000`; Hermes sorts keys; Claude Code writes them in "
        "schema order",
    ),
    Rule(
        name="inline-think",
        kind="canonical",
        verdict="equivalent",
        harnesses=("Hermes", "clients without a member for reasoning"),
        what="a leading `<think>…</think>` in a text is its reasoning, also if the reply was cut off before `</think>`",
        source=f"{_CAPTURED}, `inline markup` script",
        part="reasoning",
        rewrites_reply=_thinking_cut_off,
        only_with=_OPENING,
    ),
    Rule(
        name="reasoning-dropped",
        kind="canonical",
        verdict="equivalent",
        harnesses=("Hermes", "OpenCode (responses)", "Gemini CLI", "OpenHands", "Terminus-2", "LangChain", "smolagents"),
        what="the reasoning is not returned; other reasoning than the model's is never accepted",
        source=f"{_CAPTURED}, table of echo habits",
        part="reasoning",
    ),
    Rule(
        name="tool-ids",
        kind="canonical",
        verdict="equivalent",
        harnesses=("Kimi Code", "Hermes (messages)", "LiteLLM", "OpenClaw", "Agno", "Droid"),
        what="ids of calls are rewritten: `[^A-Za-z0-9_-]` as `_`; all but letters and digits removed, if the id looks random; or "
        "completely, if only one turn matches",
        source=f"{_CAPTURED}: ids with `.` or `:` (`functions.Bash:0`); OpenClaw 2026.9.6: `call_1a2b3c4d` as `call1a2b3c4d`; "
        "Droid 0.215.0: `call_`, the first 24 characters, `_` and a count",
    ),
    Rule(
        name="interrupted",
        kind="canonical",
        verdict="rewritten",
        harnesses=("Claude Code", "Codex", "any that keeps what it received"),
        what="a text that ends where the stream was cut, or before the first call, if it is what was sent up to an event, and a token ends "
        "there; or a reply that ends after a complete call, if the stream was cut after it",
        source=f"{_CAPTURED}: Esc after 44 of 136 events, 180 of 180 characters were returned",
        part="text",
    ),
    Rule(
        name="stop-restored",
        kind="canonical",
        verdict="equivalent",
        harnesses=("OpenHands", "smolagents", "search agents"),
        what="the stop string that ended the reply is written back after its text; its ids were sampled",
        source="public reports: OpenHands/software-agent-sdk#998, PrimeIntellect-ai/verifiers#56, NovaSky-AI/SkyRL#190",
        part="text",
    ),
    Rule(
        name="words-added",
        kind="canonical",
        verdict="rewritten",
        harnesses=("CrewAI",),
        what="words of the harness follow the text of the last reply, in the same message; the reply keeps its ids, the words are context. "
        "Only if the request had stop strings",
        source="public reports: crewAIInc/crewAI#1620, crewAIInc/crewAI#1437",
        part="text",
    ),
    Rule(
        name="calls-hidden",
        kind="canonical",
        verdict="rewritten",
        harnesses=("all that use Gemini",),
        what="calls whose arguments are not a JSON object, which Gemini cannot show (`MALFORMED_FUNCTION_CALL`), are not returned",
        source="recorded traffic: google-genai 3.4, pydantic-ai 2.68, LangChain 4.4, LiteLLM 1.110 go on after such a reply",
    ),
    Rule(
        name="input-as-served",
        kind="canonical",
        verdict="rewritten",
        harnesses=("Codex", "any that offers custom tools in Responses"),
        what='arguments of a custom tool that are not `{"input": …}` with one text are returned as the `input` that the client received: '
        "the arguments themselves",
        source="vLLM 0.32 `responses/utils.py` (`decode_custom_tool_input`); Codex 0.169 returns `input` verbatim",
        explains_call=_served_as_input,
    ),
)

DIALECT: tuple[Rule, ...] = (
    Rule(
        name="billing-line",
        kind="dialect",
        verdict="same",
        harnesses=("Claude Code",),
        what="the `x-anthropic-billing-header` line of the system prompt, which may hold a nonce",
        source="recorded traffic; vLLM strips it, too (vllm#36829)",
    ),
    Rule(
        name="cache-marks",
        kind="dialect",
        verdict="same",
        harnesses=("Claude Code",),
        what="`cache_control`, which moves with every call",
        source=_CAPTURED,
    ),
    Rule(
        name="result-parts",
        kind="dialect",
        verdict="same",
        harnesses=("Claude Code", "Gemini CLI", "OpenCode (responses)"),
        what="parts of a tool's result that chat completions have no equivalent for, such as PDF documents; its text and images stay",
        source="recorded traffic: Claude Code 2.1.332 `Read`, Gemini CLI 0.61 `read_file`, OpenCode 1.18 `read`; vLLM 0.32 ignores them in "
        "Messages, too",
    ),
    Rule(
        name="items-merged",
        kind="dialect",
        verdict="same",
        harnesses=("Codex", "openai-agents", "Pi", "LangChain", "OpenCode"),
        what="the items of a reply (reasoning, message, calls) are one message; their `id`, `status`, `phase` and annotations are left out",
        source=f"{_CAPTURED}, responses",
    ),
    Rule(
        name="blocks-merged",
        kind="dialect",
        verdict="same",
        harnesses=("Claude Code", "Goose"),
        what="blocks, or messages, that together are one reply are one message",
        source=f"{_CAPTURED}; source (Goose)",
    ),
)

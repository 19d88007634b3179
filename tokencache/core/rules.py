"""Rules: what is forgiven when a reply comes back, each with a name, a reason and a switch.

A harness does not send back what it was served. Whether what came back is still the model's turn is decided by a list,
never by likeness: every way in which an echo may differ is one *rule* here, and what is on no list is a miss. There are
three kinds:

`canonical`  says the same in other bytes, or less of it. On for all harnesses; named and counted whenever it was needed.
`vouched`    changes a value: the harness says something the model did not. Such a reply is supplied only where the
             session's adapter names that very rule as its harness's habit, and only if the echo is exactly what the rule
             makes of the served value (`rewrites`).
`dialect`    a codec leaves something of the request out, because no engine should see it. Named and counted.

Every rule can be switched off (`Leniency.off`): a reply that needs it is then not supplied.
"""

from typing import Literal

import msgspec

Kind = Literal["canonical", "vouched", "dialect"]


class Rule(msgspec.Struct, frozen=True):
    """One thing that is forgiven: what it is, who does it (harness names), and where that was seen.

    `verdict` is what a reply is that needs no other rule.
    """

    name: str
    kind: Kind
    verdict: Literal["same", "equivalent", "rewritten"]
    harnesses: tuple[str, ...]
    what: str
    source: str


_ALL = ("all",)
_CAPTURED = "recorded traffic"

RULES: tuple[Rule, ...] = (
    Rule(
        "content-shape",
        "canonical",
        "equivalent",
        _ALL,
        '`null`, `""`, absent, an empty list and blank text are one; a list of text parts is its text',
        f'{_CAPTURED}: null by agents, LangChain, pydantic-ai, Pi, Kimi Code; `""` by OpenCode, Qwen Code, Hermes',
    ),
    Rule(
        "whitespace",
        "canonical",
        "equivalent",
        ("Hermes", "Qwen Code", "Gemini CLI", "smolagents", "Crush"),
        "white space (and U+FEFF) around a text or a reasoning, never inside it",
        f"{_CAPTURED}: Hermes `str.strip()`; Gemini CLI after `--resume`; Crush `strings.TrimSpace` (source)",
    ),
    Rule(
        "args-json",
        "canonical",
        "equivalent",
        ("all but Codex, openai-agents and mini-swe-agent",),
        "arguments by value: key order, spacing, escapes, numbers as doubles, the last duplicate key; "
        '`""` is `{}`, a lone surrogate is U+FFFD',
        f"{_CAPTURED}: every JavaScript client writes `10000.0` as `10000`; Hermes sorts keys; Claude Code writes them in schema order",
    ),
    Rule(
        "inline-think",
        "canonical",
        "equivalent",
        ("Hermes", "clients without a member for reasoning"),
        "a leading `<think>…</think>` in a text is its reasoning",
        f"{_CAPTURED}, `inline markup` script",
    ),
    Rule(
        "reasoning-dropped",
        "canonical",
        "equivalent",
        ("Hermes", "OpenCode (responses)", "Gemini CLI", "OpenHands", "Terminus-2", "LangChain", "smolagents"),
        "the reasoning did not come back; other reasoning than the model's is never forgiven",
        f"{_CAPTURED}, table of echo habits",
    ),
    Rule(
        "tool-ids",
        "canonical",
        "equivalent",
        ("Kimi Code", "Hermes (messages)", "LiteLLM"),
        "ids of calls are rewritten: `[^A-Za-z0-9_-]` as `_`, or altogether where nothing else can be meant",
        f"{_CAPTURED}: ids with `.` or `:` (`functions.Bash:0`)",
    ),
    Rule(
        "interrupted",
        "canonical",
        "rewritten",
        ("Claude Code", "any that shows what it had heard"),
        "a text that ends where the harness left, if it is what was delivered up to an event and its last token ends there, too",
        f"{_CAPTURED}: Esc after 44 of 136 events, 180 of 180 characters came back",
    ),
    Rule(
        "cd-prefix",
        "vouched",
        "rewritten",
        ("Claude Code",),
        "`Bash.command`: a leading `cd <one shell word> && ` is gone",
        f"{_CAPTURED}, `input-rewrite`",
    ),
    Rule(
        "coerced-values",
        "vouched",
        "rewritten",
        ("Claude Code",),
        'a member `"5000"` came back as `5000`, `"true"` as `true`, `"false"` as `false`',
        f"{_CAPTURED}, `input-rewrite`: only some members are coerced",
    ),
    Rule(
        "trailing-blanks",
        "vouched",
        "rewritten",
        ("Claude Code",),
        "members named `content`: blanks and tabs at the ends of lines are gone",
        f"{_CAPTURED}, `input-rewrite` (`Write.content`)",
    ),
    Rule(
        "default-inserted",
        "vouched",
        "rewritten",
        ("Claude Code",),
        "`Edit` got the member `replace_all: false`",
        f"{_CAPTURED}, `input-rewrite`",
    ),
    Rule(
        "unparsed-input",
        "vouched",
        "rewritten",
        ("Claude Code",),
        'arguments that are no JSON object came back as `{"__unparsedToolInput": {"raw": …, "len": …}}`, `raw` being what was said',
        f"{_CAPTURED}, malformed calls",
    ),
    Rule(
        "secrets-masked",
        "vouched",
        "rewritten",
        ("Hermes",),
        "credentials with a known prefix are masked: six characters, `...`, four characters; under 18 characters `***`",
        "source: Hermes 0.19.0 `agent/redact.py`; recorded traffic (`sk-pro...abcd`)",
    ),
    Rule(
        "markup-removed",
        "vouched",
        "rewritten",
        ("Hermes",),
        "`<think>…</think>` and `<tool_call>…</tool_call>` within a text are gone",
        "source: Hermes 0.19.0 `agent_runtime_helpers.py` (`strip_think_blocks`); recorded traffic",
    ),
    Rule(
        "empty-marker",
        "vouched",
        "rewritten",
        ("Hermes",),
        "a reply without text and calls came back as `(empty)`; known in its own place only",
        f"{_CAPTURED}, thinking-only answers",
    ),
    Rule(
        "invalid-tool",
        "vouched",
        "rewritten",
        ("OpenCode",),
        'a call is renamed to `invalid`, its arguments are `{"tool": <its name>, "error": …}`; the id is kept',
        f"{_CAPTURED}, malformed calls and unknown tools",
    ),
    Rule(
        "args-repaired",
        "vouched",
        "rewritten",
        ("Pi", "LangChain", "Qwen Code"),
        "arguments that were cut came back closed: an incomplete end dropped, open strings, lists and objects ended, nothing added",
        f"{_CAPTURED}, malformed calls and length stops",
    ),
    Rule(
        "args-emptied",
        "vouched",
        "rewritten",
        ("Kimi Code", "Crush"),
        "arguments that are no JSON object came back as `{}`",
        f"{_CAPTURED} (Kimi Code), source (Crush 37f36e9)",
    ),
    Rule(
        "invalid-json-wrapped",
        "vouched",
        "rewritten",
        ("pydantic-ai",),
        'arguments that are no JSON object came back as `{"INVALID_JSON": <what was said>}`',
        f"{_CAPTURED}, malformed calls",
    ),
    Rule(
        "malformed-wrapped",
        "vouched",
        "rewritten",
        ("OpenHands",),
        'arguments that are no JSON object, or empty, came back as `{"_openhands_malformed_tool_call": true, "error": …}`',
        f"{_CAPTURED}, malformed calls",
    ),
    Rule(
        "marker-broken",
        "vouched",
        "rewritten",
        ("pydantic-ai",),
        "U+200D stands behind the `<` of every `<|…|>` in texts and arguments",
        "source: pydantic-ai 2.68.0 `_special_tokens.py`; recorded traffic",
    ),
    Rule(
        "calls-as-text",
        "vouched",
        "rewritten",
        ("smolagents",),
        "calls came back within the text, as `Calling tools:` and a Python list; or a code block got its closing `</code>`",
        "source: smolagents 1.26.0 `memory.py`, `agents.py`; recorded traffic",
    ),
    Rule(
        "reasoning-emptied",
        "vouched",
        "rewritten",
        ("LangChain (responses)",),
        "the item of a reasoning came back with no content in it",
        f"{_CAPTURED}, responses, streamed",
    ),
    Rule(
        "billing-line",
        "dialect",
        "same",
        ("Claude Code",),
        "the `x-anthropic-billing-header` line of the system prompt, which may hold a nonce",
        "recorded traffic; vLLM strips it, too (vllm#36829)",
    ),
    Rule("cache-marks", "dialect", "same", ("Claude Code",), "`cache_control`, which moves with every call", _CAPTURED),
    Rule(
        "items-merged",
        "dialect",
        "same",
        ("Codex", "openai-agents", "Pi", "LangChain", "OpenCode"),
        "the items of a reply (reasoning, message, calls) are one message; their `id`, `status`, `phase` and annotations are left out",
        f"{_CAPTURED}, responses",
    ),
    Rule(
        "blocks-merged",
        "dialect",
        "same",
        ("Claude Code", "Goose"),
        "blocks, or messages, that together are one reply are one message",
        f"{_CAPTURED}; source (Goose)",
    ),
)
"""Every rule, in the order in which `docs/rules.md` shows them."""

BY_NAME = {rule.name: rule for rule in RULES}


class Leniency(msgspec.Struct, frozen=True):
    """What is forgiven in one session.

    `off` are rules that are switched off, `vouched` those that the session's adapter names as its harness's habit.
    """

    off: frozenset[str] = frozenset()
    vouched: frozenset[str] = frozenset()

    def allows(self, rule: str) -> bool:
        """Whether a rule, by its name, may be relied on."""
        return rule not in self.off and (BY_NAME[rule].kind != "vouched" or rule in self.vouched)


STRICT = Leniency()
"""Nobody vouches for anything: the canonical rules only."""

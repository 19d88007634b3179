"""The page `docs/rules.md`, written from the registry and from what is known of harnesses: `python -m tests.core.rules_page`."""

from pathlib import Path

from tokencache.core.rules import RULES, Rule

_KINDS = {"canonical": "always", "harness": "if the adapter names it", "dialect": "in its dialect"}

HEAD = """# What is forgiven

Written by `python -m tests.core.rules_page` from `tokencache/core/rules/`; a test holds it to that.

A reply that comes back is the model's turn only if every difference to what was served is explained by a rule here, and by no
likeness. The verdicts: `same`; `equivalent` (canonical rules only); `rewritten` (a value changed: supplied only if the session's
adapter vouches for every rule that was needed); `foreign` (no rule makes this of what the model said). What is not supplied is
text of the harness's own: the turn is a miss, with a reason. Ids and handles say where to look, never that it is the same.

Every reply in a prompt is judged, not only the last. A turn keeps a hash of the assistant messages of its history as they were
written, of their handles, and of the rules in force. A history that begins with the same bytes inherits that judgement. Otherwise
each reply is judged again along the line of turns (`core/evidence.py`).

Every rule can be switched off by its name; a reply that needs it is then not supplied. A call of which a codec left something
out by a rule that is switched off is rendered plainly (`switched-off`).

**Context is never forgiven.** Dates, reminders, directory trees, pruned tool results, edited system prompts are the harness's own
words, and the prompt must hold them as they are (fidelity). That includes white space, the number of text parts, names of participants
and tools, ids of tool results, members that we do not know, and the reasoning of assistant messages that the model did not write. Where
something changes, the conversation is rendered anew, and the replies that are still the model's own keep their tokens: `resplice`, a new
lineage. If the template renders both alike, the prompt goes on from the same ids after all: `continue`, reason `rendered-alike`. So a
change that no template shows costs one full rendering and nothing else.

Left out of the comparison is what vLLM 0.32 hides from every template: the order of JSON members, `cache_control`, and a single text part
in place of a string.

## Evidence: which turn is this reply?

If nothing before a reply changed, its position identifies it. Otherwise its text alone does not: a few-shot example may contain the
same text. The following evidence counts, strongest first:

| evidence | how strong |
|---|---|
| the place: everything before it is unchanged | names the turn, unless two turns of the same place said the same in other tokens |
| the token ids of a recorded turn, sent back with the message (NeMo Gym's agents) | name the turn, wherever the message stands |
| a handle that was given out with the reply | 128 random bits |
| an id of a call, as it was issued, that looks drawn at random | as strong as the engine makes its ids: 64 bits in vLLM 0.32 |
| an id of a call that only counts (`functions.bash:0`) | counts with the same message, or the same recognised reply, directly before |
| the same message directly before the reply | names the turn if no other recorded turn has both the words and that message |
| the same reply before, and all the same messages since | decides between turns that fit equally |

Token ids are compared by hash: those of the prompt and the generation together, and those of the generation. They decide between turns of
the same place, too. They never make up for words: the message must still be the reply by the rules below. Ids of another session are not
looked up. Ids that no recorded turn has are not evidence: see
[decision 0024](decisions/0024-use-returned-ids-only-if-recorded-or-proven.md).

If several turns still fit and their tokens differ, none is taken (`ambiguous-reply`). Turns of equal tokens are interchangeable. A harness
that copies both a reply's words and the message before it into an example is not told from the model: no evidence is left that could.
Only turns of the same model are compared: tokens of another model are not looked for.

## The rules

| rule | kind | verdict | who does it | what | where it was seen |
|---|---|---|---|---|---|
"""

HABITS: tuple[tuple[str, tuple[tuple[str, str, str, tuple[str, ...]], ...]], ...] = (
    (
        "Required canonicalisation",
        (
            ('content shape: string, parts, null, `""`, absent', "all", "equivalent", ("content-shape",)),
            ("white space around content; interior verbatim", "Hermes, Crush, Gemini CLI, smolagents", "equivalent", ("whitespace",)),
            ("`<think>`/`<tool_call>` removed, secrets masked", "Hermes", "rewritten", ("markup-removed", "secrets-masked")),
            ("U+200D in special tokens", "pydantic-ai", "rewritten", ("marker-broken",)),
            ("arguments re-serialised", "all but Codex, openai-agents, mini-swe-agent", "equivalent", ("args-json",)),
            ("arguments unparsable or empty", "all", "see malformed calls", ()),
            ("ids sanitised", "Kimi Code, Hermes, LiteLLM", "equivalent", ("tool-ids",)),
            ("reasoning dropped, trimmed, renamed", "most", "equivalent", ("reasoning-dropped", "whitespace", "inline-think")),
            ("items of a reply", "Codex, openai-agents, Pi, LangChain, OpenCode", "same", ("items-merged",)),
            ("`developer` is `system`", "Pi, Codex", "same", ()),
            ("`cache_control`, members beside text and calls", "Claude Code, LiteLLM, Hermes, Gemini CLI", "same", ("cache-marks",)),
            ("billing header", "Claude Code", "same", ("billing-line",)),
        ),
    ),
    (
        "What happens to an assistant's turn",
        (
            ("verbatim, keys in schema order", "Claude Code", "equivalent", ("args-json",)),
            ("blocks, or parallel calls, in several messages", "Claude Code, Goose", "same", ("blocks-merged",)),
            ("verbatim throughout", "Codex, openai-agents (responses)", "same", ()),
            ("compact arguments, reasoning under its other name", "OpenCode, Pi, Kimi Code", "equivalent", ("args-json",)),
            ("stripped text, sorted arguments, no reasoning", "Hermes", "equivalent", ("whitespace", "args-json", "reasoning-dropped")),
            ("trimmed reasoning", "Qwen Code", "equivalent", ("whitespace",)),
            ("trimmed after a resume, no thoughts", "Gemini CLI", "equivalent", ("whitespace", "reasoning-dropped")),
            ("verbatim, content absent", "mini-swe-agent", "equivalent", ("content-shape",)),
            ("parts, Python's JSON, no reasoning", "OpenHands", "equivalent", ("content-shape", "args-json", "reasoning-dropped")),
            ("verbatim text, no reasoning", "Terminus-2", "equivalent", ("reasoning-dropped",)),
            ("no reasoning, Python's JSON", "LangChain (chat)", "equivalent", ("args-json", "reasoning-dropped")),
            ("reasoning item kept, content empty", "LangChain (responses)", "rewritten", ("reasoning-emptied",)),
            ('`""` for reasoning on turns without', "pydantic-ai, Kimi Code", "same", ()),
            ("calls flattened into the text, `</code>` appended", "smolagents", "rewritten", ("calls-as-text",)),
            ("text trimmed, invalid JSON as `{}`", "Crush", "rewritten", ("whitespace", "args-emptied")),
        ),
    ),
    (
        "Claude Code's rewrites of tool input",
        (
            ("`cd <cwd> && ` stripped", "Claude Code", "rewritten", ("cd-prefix",)),
            ('`"5000"` → `5000`, `"false"` → `false`, only some members', "Claude Code", "rewritten", ("coerced-values",)),
            ("blanks at the ends of lines of `Write.content`", "Claude Code", "rewritten", ("trailing-blanks",)),
            ("`replace_all: false` inserted", "Claude Code", "rewritten", ("default-inserted",)),
            ("unknown or invalid members kept", "Claude Code", "same", ()),
            ("duplicate keys, lone surrogates", "Claude Code", "equivalent", ("args-json",)),
        ),
    ),
    (
        "Malformed calls, empty answers, length stops",
        (
            ("`__unparsedToolInput`", "Claude Code", "rewritten", ("unparsed-input",)),
            ("verbatim", "Codex, openai-agents", "same", ()),
            ("renamed to `invalid`", "OpenCode", "rewritten", ("invalid-tool",)),
            ("repaired and executed", "Pi, LangChain, Qwen Code", "rewritten", ("args-repaired",)),
            ("`{}`", "Kimi Code, Crush", "rewritten", ("args-emptied",)),
            ("`INVALID_JSON`", "pydantic-ai", "rewritten", ("invalid-json-wrapped",)),
            ("`_openhands_malformed_tool_call`", "OpenHands", "rewritten", ("malformed-wrapped",)),
            ("empty arguments as `{}`", "most", "equivalent", ("args-json",)),
            ("turn dropped, asked again", "Hermes, Qwen Code, mini-swe-agent, Kimi Code", "no reply to judge; a sibling", ()),
            ("thinking-only turn dropped", "Claude Code", "no reply to judge; the turn before is continued", ()),
            ("`(empty)` for nothing", "Hermes", "rewritten", ("empty-marker",)),
            ('`""` for thinking only', "Hermes, OpenHands", "equivalent", ("reasoning-dropped", "content-shape")),
            ("cut text kept, and a nudge", "Claude Code, Hermes", "same", ()),
            ("`[The previous response was interrupted …]`", "Gemini CLI", "foreign", ()),
        ),
    ),
    (
        "Unicode, inline markup, interrupts",
        (
            ("NFD, NBSP, ZWJ, CRLF inside a text kept", "all", "same", ()),
            ("lone surrogates in arguments as U+FFFD", "Claude Code", "equivalent", ("args-json",)),
            ("text up to the last event heard", "Claude Code", "rewritten", ("interrupted",)),
            ("interrupt with a call begun", "any", "not known; text of the harness's own", ()),
        ),
    ),
    (
        "Injected and changing context, compaction",
        (
            ("dates, reminders, directory trees", "Claude Code, Qwen Code, Gemini CLI, Kimi Code", "never forgiven: `resplice`", ()),
            ("edited system prompts", "any", "never forgiven: `resplice`", ()),
            ("old tool results rewritten, tail kept", "Hermes", "never forgiven: `resplice`", ()),
            ("summary and the last turn verbatim", "Claude Code, Pi, OpenCode", "`resplice`; the summary is foreign", ()),
            ('"Got it. Thanks for the additional context!" beside a genuine call', "Qwen Code", "foreign", ()),
        ),
    ),
)
"""Tables of what harnesses do: (what, who, verdict, rules)."""


def _rule(rule: Rule) -> str:
    verdict = rule.verdict if rule.kind != "harness" else "rewritten, supplied if the adapter names it"
    return _row(f"`{rule.name}`", f"{rule.kind}: {_KINDS[rule.kind]}", verdict, ", ".join(rule.harnesses), rule.what, rule.source)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def page() -> str:
    """Write the page."""
    parts = [HEAD, *map(_rule, RULES.values()), "\n# What harnesses do, and what becomes of it\n"]
    for title, rows in HABITS:
        parts += [f"\n## {title}\n\n", _row("what", "who", "verdict", "rules"), "|---|---|---|---|\n"]
        parts += [_row(what, who, verdict, ", ".join(f"`{rule}`" for rule in rules)) for what, who, verdict, rules in rows]
    return "".join(parts)


if __name__ == "__main__":
    Path(__file__).parents[2].joinpath("docs/rules.md").write_text(page())

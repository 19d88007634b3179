"""What must come of each harness's job: its sequences, and what cannot be had, with the reason.

A sequence is `(how it starts, why, turns)`. One `root` of all turns is what an unbroken run gives; a title is a root of
its own. Where a harness itself rewrites what came before, the best there is stands here instead, with a note for the table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """The sequences that a run through the proxy has, in order of their start, and what to say about them."""

    sequences: list
    note: str = ""
    directly: bool = True
    """Whether the engine itself speaks its dialect."""


def unbroken(turns):
    return Expected([("root", "", turns)])


EXPECTED = {
    "claude-code": unbroken(12),
    "codex": unbroken(7),
    "hermes": unbroken(7),
    "opencode": Expected([("root", "", 1), ("root", "", 8)], "The title call is a sequence of its own."),
    "mini-swe-agent": unbroken(6),
    "openai-agents": unbroken(7),
    "openai-agents-chat": unbroken(7),
    "langgraph": unbroken(7),
    "pydantic-ai": unbroken(7),
    "smolagents": Expected([("root", "", 7)], "Its answers are calls and nothing else: it asks for `tool_choice: required`."),
    "openhands": unbroken(7),
    "terminus-2": Expected([("root", "", 6)], "In a terminal on the machine itself, without a container; one of its answers was no JSON."),
    "qwen-code": Expected(
        [("root", "", 5), ("resplice", "context-edited", 2)],
        "On resume it makes the directory tree in its first message anew: there a sequence begins, with all answers' exact tokens in it.",
    ),
    "gemini-cli": Expected(
        [("root", "", 5), ("resplice", "context-edited", 2)],
        "On resume it makes the directory tree in its first message anew and sends tool results twice: there a sequence begins, with all "
        "answers' exact tokens in it. vLLM does not speak this dialect: it is the proxy that translates it.",
        directly=False,
    ),
    "pi": unbroken(7),
    "kimi-code": Expected(
        [("root", "", 7)],
        "The adapter sets an effort. Unset, it is asked for from the second call on only, and the first call is a sequence of its own.",
    ),
}

NOT_RUN = {
    "Crush": "Its npm package fetches the program from GitHub while it is installed; the lab takes programs from npm and PyPI alone.",
    "Goose": "Neither on npm nor on PyPI.",
}
"""Harnesses that are asked for and were not run, with the reason."""

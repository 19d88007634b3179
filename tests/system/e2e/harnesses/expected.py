"""The expected sequences of each harness's job, and what is not possible, with the reason.

A sequence is `(how it starts, why, turns)`. An uninterrupted run gives one `root` of all turns; a title is a separate root. If a harness
itself rewrites the history, the best possible result is listed here instead, with a note for the table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """The expected sequences of a run through the proxy, in order of their start, and a note about them."""

    sequences: list
    note: str = ""
    directly: bool = True
    """Whether the engine itself supports its dialect."""
    rendered: int = 0
    """How often an earlier reply is in a prompt without its own ids."""


def unbroken(turns):
    return Expected([("root", "", turns)])


EXPECTED = {
    "claude-code": unbroken(13),
    "codex": unbroken(7),
    "hermes": unbroken(9),
    "opencode": Expected([("root", "", 1), ("root", "", 10)], "The title call is a separate sequence."),
    "mini-swe-agent": unbroken(6),
    "openai-agents": unbroken(7),
    "openai-agents-chat": unbroken(7),
    "langgraph": unbroken(7),
    "pydantic-ai": unbroken(7),
    "smolagents": Expected([("root", "", 7)], "Its answers consist only of calls: it sends `tool_choice: required`."),
    "crewai": unbroken(6),
    "strands": unbroken(8),
    "google-adk": unbroken(7),
    "google-adk-gemini": Expected([("root", "", 7)], directly=False),
    "agno": unbroken(7),
    "openhands": unbroken(9),
    "terminus-2": Expected([("root", "", 6)], "In a terminal on the machine itself, without a container; one of its answers was not JSON."),
    "qwen-code": Expected(
        [("root", "", 6), ("resplice", "context-edited", 2)],
        "On resume it rebuilds the directory tree in its first message: a sequence with all answers' exact tokens begins there.",
    ),
    "gemini-cli": Expected(
        [("root", "", 5), ("resplice", "context-edited", 2)],
        "On resume it rebuilds the directory tree in its first message and sends tool results twice: a sequence with all "
        "answers' exact tokens begins there. vLLM does not support this dialect: the proxy translates it.",
        directly=False,
    ),
    "pi": unbroken(7),
    "kimi-code": Expected(
        [("root", "", 7)],
        "The adapter sets an effort. If it is unset, it is sent only from the second call on, and the first call is a separate sequence.",
    ),
    "openclaw": Expected(
        [("root", "", 1), *[("resplice", "context-edited", 1)] * 6],
        "With every call it moves a message with its context to the end: each call begins a sequence. Replies with calls keep their exact "
        "tokens in it. The reply without a call has nothing that identifies it, and is rendered as text.",
        rendered=2,  # in both calls of the second task
    ),
    "copilot": unbroken(7),
    "kilo": unbroken(11),
    "cline": unbroken(6),
    "continue": unbroken(7),
    "droid": unbroken(6),
}

NOT_RUN = {
    "Crush": "Its npm package downloads the program from GitHub during installation; the tests install programs only from npm and PyPI.",
    "Goose": "Neither on npm nor on PyPI.",
}
"""Requested harnesses that were not run, with the reason."""

"""Runs in which a harness reads pictures, in each way that it has: with a tool, in the user's prompt, the same one twice, a large one.

The pictures show nothing; the names are for the model's words only.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from namespace import WORK
from programs import CODEX, Step
from rig.server import MODEL
from rig.vision import png
from structures import in_order
from tasks import call, say

FILES = {
    "red.png": png(64, 48, 1),
    "blue.png": png(96, 64, 2),
    "green.png": png(33, 57, 3),
    "wide.png": png(2100, 12, 4),
}
"""Pictures in the work directory. `wide.png` is larger than the makers of models recommend: some harnesses scale it."""


@dataclass(frozen=True)
class Pictures:
    """A run of a harness that sends pictures: the model's turns, the steps, and the expected sequences."""

    harness: str
    turns: list
    steps: Callable
    """The run's name → its steps."""
    sequences: list
    files: dict = field(default_factory=dict)
    """Further files in the work directory: name → content."""
    note: str = ""
    """How the images get into a request."""
    title: str = ""
    """The program, if the adapter's title is not its name."""
    needs: tuple = ()
    """Programs, one of which has to be on this machine."""
    one_by_one: bool = False
    """Whether the history does not contain the model's answers, so that their number does not tell which is next."""


def reads(tool, member, **others):
    """Turns in which the model reads pictures with this tool, and the user then sends another one."""

    def read(name):
        return call(tool, json.dumps({member: f"{WORK}/{name}", **others}))

    return [
        say("\nThe red one first.\n", "Let me look — ☕.  \n", read("red.png")),
        say("\nTwo at once.\n", "", read("blue.png"), read("green.png")),
        say("\nThe wide one.\n", "  \n", read("wide.png")),
        say("\nOnce more.\n", "Again:", read("red.png")),
        say("\nSeen.\n", "\nOne is red ✅.  "),
        say("\nIt was sent.\n", "On it.\n", read("blue.png")),
        say("\nSeen.\n", "It is green.\n"),
    ]


FIRST, SECOND = "Look at the pictures.", "And what is in @green.png ?"


def attaching(name):
    """Codex attaches pictures to a prompt by an option."""
    return [
        Step(["exec", *CODEX, "--image", "red.png", "--", f"EPISODE:{name} {FIRST}"]),
        Step(["exec", "resume", "--last", *CODEX, "--image", "green.png", "--", "And this one?"]),
    ]


def with_files(name):
    """OpenCode, too."""
    return [
        Step(["run", f"EPISODE:{name} {FIRST}", "--format", "json", "-f", "red.png"]),
        Step(["run", "--continue", "And this one?", "--format", "json", "-f", "green.png"]),
    ]


SEES = {"attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
SEEING = {"provider": {"tokencache": {"models": {MODEL: SEES}}}}
"""OpenCode sends images only to models that are declared to see them. It reads this from the project's folder."""

SCREENS = {f"screen-{step}.png": png(80, 60, step) for step in range(1, 7)}


def use(**arguments):
    return call("computer", json.dumps(arguments))


USING = [
    say("\nWhat is there?\n", "Looking — ☕.\n", use(action="screenshot")),
    say("\nA button.\n", "", use(action="left_click", coordinate=[10, 20])),
    say("\nA field.\n", "  \n", use(action="type", text="héllo")),
    say("\nOn.\n", "Next:", use(action="left_click", coordinate=[30, 40])),
    say("\nAnd on.\n", "", use(action="type", text="wörld")),
    say("\nLook again.\n", "", use(action="screenshot")),
    say("\nDone.\n", "\nDone ✅.  "),
]


def acts(thought, goal, **action):
    """An answer of browser-use: JSON, with the next actions."""
    return say(thought, json.dumps({"evaluation_previous_goal": "Fine.", "memory": "naïve ☕", "next_goal": goal, "action": [action]}))


PAGE = b"<!doctype html><title>Page</title><body><h1>Here</h1><p><a id=more href='#more'>More</a><p><input id=name><button>Go</button>"
BROWSING = [
    acts("\nOpen it.\n", "open the page", navigate={"url": "http://127.0.0.1:8123/page.html"}),
    acts("\nA link.\n", "click", click={"index": 1}),
    acts("\nDown.\n", "scroll", scroll={"down": True, "pages": 1.0}),
    acts("\nWait.\n", "wait", wait={"seconds": 1}),
    acts("\nDone.\n", "end", done={"text": "Seen.", "success": True, "files_to_display": []}),
]


MOST = 16
"""Images in a request, at most: Gemini CLI sends twelve."""


def seeing(name):
    """Hermes sends images only to models that are declared to see them, in its own configuration."""
    return [
        Step(["config", "set", "model.supports_vision", "true"]),
        Step(["chat", "-q", f"EPISODE:{name} {FIRST}", "-Q", "--yolo", "--image", "red.png"]),
        Step(["chat", "--continue", "-q", "And this one?", "-Q", "--yolo", "--image", "green.png"]),
    ]


PICTURES = {
    "hermes_images": Pictures(
        "hermes",
        reads("vision_analyze", "image_url", question="What is it?"),
        seeing,
        [("root", "", 5), ("resplice", "context-edited", 2)],
        note="`vision_analyze`, and `--image`; on resume it replaces every image by a text",
    ),
    "claude-code_images": Pictures(
        "claude-code",
        reads("Read", "file_path"),
        in_order(FIRST, SECOND),
        [("root", "", 7)],
        note="`Read`, and `@file` in the prompt",
    ),
    "codex_images": Pictures(
        "codex",
        reads("view_image", "path"),
        attaching,
        [("root", "", 7)],
        note="`view_image`, and `--image`",
    ),
    "opencode_images": Pictures(
        "opencode",
        reads("read", "filePath"),
        with_files,
        [("root", "", 1), ("root", "", 7)],
        files={"opencode.json": json.dumps(SEEING).encode()},
        note="`read`, and `--file`",
    ),
    "gemini-cli_images": Pictures(
        "gemini-cli",
        reads("read_file", "file_path"),
        in_order(FIRST, SECOND),
        [("root", "", 5), ("resplice", "context-edited", 2)],
        note="`read_file`, and `@file` in the prompt; on resume it sends every result twice",
    ),
    "computer-use_images": Pictures(
        "computer-use",
        USING,
        in_order("Fill in the form."),
        [("root", "", 4), ("resplice", "context-edited", 2), ("resplice", "context-edited", 1)],
        files=SCREENS,
        title="Computer use with Anthropic's client",
        note="a screenshot in each result; old ones are removed",
    ),
    "browser-use_images": Pictures(
        "browser-use",
        BROWSING,
        in_order("Look at the page."),
        [("root", "", 1)] * len(BROWSING),
        files={"page.html": PAGE},
        title="browser-use",
        note="the current screenshot; no answer comes back",
        needs=("chromium", "chromium-browser", "google-chrome"),
        one_by_one=True,
    ),
}


def scripts():
    """Episodes for the scripted model."""
    side = say("\nA title is wanted.\n", "Look At Pictures")
    return {name: {"turns": run.turns, "side": side} for name, run in PICTURES.items()}

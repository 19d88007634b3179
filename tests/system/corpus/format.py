"""The files of the corpus: one recorded run of one harness in each, as JSON, one value a line.

The first line is the header. Then, in the order in which the calls arrived, one line per call, each after the values that
it is the first to share:

    {"format": 1, "harness": "codex", "version": …, "dialect": …, …}            `Header`
    {"shared": "tools-1", "is": […]}                                            large and repeated, so written once
    {"call": 1, "after": [], "path": …, "body": {"tools": {"$": "tools-1"}, …}, "said": …, "expected": {…}}     `Call`

`README.md` explains the members for users of the files.
"""

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
REFERENCE = "$"
SHARED_FROM = 120
"""Minimum characters of JSON for a repeated value to be written once."""


@dataclass
class Call:
    """One model call: what the harness sent, what the model replied, and what the proxy should record."""

    call: int
    after: list[int]
    """Calls that had ended when this one was sent; calls that those followed are implied."""
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    stream: bool
    ended: str
    """`whole`, or `left`: the harness disconnected before the end."""
    said: str | list[str]
    """The text that the model sampled. For a call that was left: in the pieces in which it was delivered to the harness."""
    served: list[list[str]]
    """The ids and handles in the reply, `[member, value]`, in order."""
    expected: dict[str, Any]


@dataclass
class Header:
    """What the file is, how it was made, and what is expected of the whole session."""

    harness: str
    version: str
    adapter: str
    dialect: str
    model: str
    task: list[str]
    """The user's prompts, in order; `EPISODE:…` selected the scripted model's turns."""
    recorded: str
    replaced: str
    expected: dict[str, Any]
    left_out: dict[str, int] = field(default_factory=dict)
    """Requests that did not request a reply of the model, counted by route."""
    format: int = FORMAT


@dataclass
class Recording:
    """A file's content, with every shared value in its place."""

    header: Header
    calls: list[Call]


def read(path: Path) -> Recording:
    """Reads a file of the corpus."""
    header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    shared: dict[str, Any] = {}
    calls = []
    for line in lines:
        if "shared" in line:
            shared[line["shared"]] = _filled(line["is"], shared)
        else:
            calls.append(Call(**{**line, "body": _filled(line["body"], shared)}))
    return Recording(Header(**header), calls)


def write(recording: Recording, path: Path) -> None:
    """Writes a file of the corpus."""
    lines = [dataclasses.asdict(recording.header)]
    seen: Counter[str] = Counter()
    for call in recording.calls:
        _count(call.body, seen)
    names: dict[str, str] = {}
    for call in recording.calls:
        body = {key: _shared(value, key, seen, names, lines) for key, value in call.body.items()}
        lines.append({**dataclasses.asdict(call), "body": body})
    path.write_text("".join(map(_line, lines)), encoding="utf-8")


def _line(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        text = json.dumps(value, separators=(",", ":"))
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085") + "\n"


def _count(value: Any, seen: Counter[str]) -> None:
    """Counts the large values, those within a repeated one only once."""
    if isinstance(value, dict | list):
        text = json.dumps(value)
        if len(text) >= SHARED_FROM:
            seen[text] += 1
            if seen[text] > 1:
                return
        for inner in value.values() if isinstance(value, dict) else value:
            _count(inner, seen)
    elif isinstance(value, str) and len(value) >= SHARED_FROM:
        seen[json.dumps(value)] += 1


def _shared(value: Any, under: str, seen: Counter[str], names: dict[str, str], lines: list[dict[str, Any]]) -> Any:
    """Replaces repeated values by references, after a line for each new one; `under` gives the names."""
    if not isinstance(value, dict | list | str):
        return value
    text = json.dumps(value)
    if text in names:
        return {REFERENCE: names[text]}
    if isinstance(value, dict):
        value = {key: _shared(inner, under, seen, names, lines) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [_shared(inner, under, seen, names, lines) for inner in value]
    if seen[text] < 2:
        return value
    names[text] = f"{under}-{len(names) + 1}"
    lines.append({"shared": names[text], "is": value})
    return {REFERENCE: names[text]}


def _filled(value: Any, shared: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if set(value) == {REFERENCE}:
            return shared[value[REFERENCE]]
        return {key: _filled(inner, shared) for key, inner in value.items()}
    return [_filled(inner, shared) for inner in value] if isinstance(value, list) else value

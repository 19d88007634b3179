"""Writes `docs/harnesses.md`: the measurements of each harness. The file is this module's output and is never edited by hand."""

import datetime as dt
import itertools
import os
from dataclasses import dataclass

from rig.server import REPOSITORY

TABLE = REPOSITORY / "docs/harnesses.md"
WRITTEN = "TOKENCACHE_E2E_WRITE_TABLE" in os.environ
"""Whether this run writes it."""

HEAD = """\
# Harnesses, measured

These are real, unmodified programs, run without a terminal, in namespaces whose only network is a loopback interface. They are
started as `tokencache run` starts them. Each does the same scripted job with its own tools: it writes files, runs calls in
parallel, and gets a second task by resume if it can. The engine is a real vLLM (CPU) whose model emits all text in tokens that
its tokenizer would not choose. Which prompt extends which call is read from the engine's own log, not from the proxy's records.

A call *owes* an extension if its history contains an answer of the model. It is *extending* if its prompt begins with an earlier
call's prompt and all its sampled tokens: *directly* on the engine, and through the proxy. *Sequences* are what a trainer gets from
the run through the proxy: how each begins, its number of turns, and why it is split off. *Rules* were applied to recognise the
harness's history ([rules.md](rules.md)). *Export* counts the exported turns whose prompt and sampled tokens are those of the
engine's log; a run in which they are not all, or whose session is not complete, writes no row.

This file is written by `make e2e-harnesses`, from a run of the tests in `tests/system/e2e/harnesses`. Each row has the date of its
run; a program that did not run keeps its row.

| run on | harness | version | dialect | calls | owed | directly | extending | sequences | rules | export = log | why it splits |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""

STRUCTURES = """
## More than one line of calls

Sub-agents, forks, compaction and interrupts, through the proxy. Each call is recorded in the sequence that it belongs to.

| run on | harness | version | what happens | calls | owed | extending | sequences | rules | export = log |
|---|---|---|---|---|---|---|---|---|---|
"""

PICTURES = """
## Images

Harnesses that send images, through the proxy to a real vLLM with a tiny model that sees images (browser-use: to the simulated engine). What
each does to an image is in [images.md](images.md).

| run on | harness | version | dialect | how the images get there | calls | owed | extending | sequences | rules | export = log |
|---|---|---|---|---|---|---|---|---|---|---|
"""

NOT_RUN = """
## Not run

| harness | why |
|---|---|
"""


def sequences(found):
    """How each begins, why if there is a reason, and its number of turns; equal neighbours together."""
    runs = [(one, len(list(equal))) for one, equal in itertools.groupby(found)]
    return ", ".join(
        (f"{times} times " if times > 1 else "") + f"{start} {turns}" + (f" ({reason})" if reason else "")
        for (start, reason, turns), times in runs
    )


def rules(names):
    return ", ".join(f"`{name}`" for name in names) or "none"


def line(*cells):
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


@dataclass(frozen=True)
class Row:
    """What identifies a row: the part of the page, the harness, and what it did (its dialect, or a note)."""

    part: str
    title: str
    what: str


@dataclass(frozen=True)
class Measured:
    """The measurements of one run through the proxy. It gets a row once the export was found equal to the engine's log."""

    version: str
    calls: int
    proxied: tuple
    """How many calls extend an earlier one, and how many owe it."""
    sequences: list
    rules: tuple
    dialect: str = ""
    directly: tuple = ()
    note: str = ""

    def line(self, row):
        """The line of this row, in the columns of its part."""
        extending, owed = self.proxied
        first = (dt.datetime.now(dt.UTC).date().isoformat(), row.title, self.version)
        exported = sum(turns for _, _, turns in self.sequences)
        found = (sequences(self.sequences), rules(self.rules), f"{exported} of {self.calls}")
        if row.part == "job":
            directly = self.directly[0] if self.directly else "not measured"
            return line(*first, row.what, self.calls, owed, directly, extending, *found, self.note)
        dialect = (self.dialect,) if row.part == "images" else ()
        return line(*first, *dialect, row.what, self.calls, owed, extending, *found)

    def figures(self, name):
        """The same in one line for the report of the tests."""
        extending, owed = self.proxied
        return (
            f"{name:<20} {self.calls:>2} calls, {extending} of {owed} extending: {sequences(self.sequences)}; "
            f"rules: {' '.join(self.rules) or 'none'} {self.note}"
        )


DIRECTLY = {}
"""Name → how many turns extend the one before without the proxy: all are measured for the table only."""
FOUND = {}
"""Row → its measurements in this test run."""
MISSING = {}
"""Title → why it was not run."""
PARTS = {"job": HEAD, "structures": STRUCTURES, "images": PICTURES}
KEY = {"job": (1, 3), "structures": (1, 3), "images": (1, 4)}
"""The columns of a part's table with the harness, and what it did."""


def earlier(path):
    """The lines of the page as it is, by row."""
    found, parts, part = {}, iter(PARTS), ""
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
        if text.startswith("| run on |"):
            part = next(parts)
        elif text.startswith("| 2"):
            cells = [cell.replace("\\|", "|") for cell in text.split(" | ")]
            found[Row(part, *(cells[column] for column in KEY[part]))] = text
    return found


def write(rows, missing, path=TABLE):
    """Writes the page with these rows in their order: those of this run, and the earlier lines of the others."""
    lines = earlier(path) | {row: measured.line(row) for row, measured in FOUND.items()}
    text = ""
    for part, head in PARTS.items():
        text += head + "".join(lines[row] for row in rows if row.part == part and row in lines)
    there = {row.title for row in lines}
    if missing := {title: why for title, why in missing.items() if title not in there}:
        text += NOT_RUN + "".join(line(title, why) for title, why in missing.items())
    path.write_text(text, encoding="utf-8")

"""Writes `docs/harnesses.md`: the measurements of each harness. The file is this module's output and is never edited by hand."""

import os
from dataclasses import dataclass
from pathlib import Path

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

*Contiguous* counts the calls with an answer of the model in their history whose prompt begins with the earlier call's prompt
and all its sampled tokens: directly on the engine, and through the proxy. *Sequences* are what a trainer gets from the run
through the proxy, with the number of turns in each; sessions that are not complete fail the test. *Rules* are the rules that
were applied to recognise the harness's history ([rules.md](rules.md)).

This file is written by `make e2e-harnesses`, from a run of the tests in `tests/system/e2e/harnesses`.

| harness | version | dialect | calls | contiguous directly | through the proxy | sequences | rules | notes |
|---|---|---|---|---|---|---|---|---|
"""

STRUCTURES = """
## More than one line of calls

Sub-agents, forks, compaction and interrupts, through the proxy. Each call is recorded in the sequence that it belongs to.

| harness | what happens | calls | contiguous | sequences | rules |
|---|---|---|---|---|---|
"""

PICTURES = """
## Images

Harnesses that send images, through the proxy to a real vLLM with a tiny model that sees images (browser-use: to the simulated engine). What
each does to an image is in [images.md](images.md).

| harness | version | dialect | how the images get there | calls | contiguous | sequences | rules |
|---|---|---|---|---|---|---|---|
"""

NOT_RUN = """
## Not run

| harness | why |
|---|---|
"""


def count(pair):
    """`(contiguous, number of follow-ups)`."""
    return f"{pair[0]} of {pair[1]}" if pair else "not possible"


def sequences(found):
    """How each begins, why if there is a reason, and its number of turns."""
    return ", ".join(f"{start} {turns}" + (f" ({reason})" if reason else "") for start, reason, turns in found)


def rules(names):
    return ", ".join(f"`{name}`" for name in names) or "none"


def line(*cells):
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


@dataclass(frozen=True)
class Row:
    """The measurements of one harness."""

    title: str
    version: str
    dialect: str
    calls: int
    directly: tuple
    proxied: tuple
    sequences: list
    rules: tuple
    note: str = ""

    def line(self):
        measured = (self.calls, count(self.directly), count(self.proxied), sequences(self.sequences), rules(self.rules))
        return line(self.title, self.version, self.dialect, *measured, self.note)

    def figures(self, name):
        """The same in one line for the report of the tests."""
        return f"{name:<20} {self.calls:>2} calls, contiguous {count(self.proxied)}; rules: {' '.join(self.rules) or 'none'} {self.note}"


@dataclass(frozen=True)
class Shape:
    """One run with a structure."""

    title: str
    what: str
    calls: int
    proxied: tuple
    sequences: list
    rules: tuple

    def line(self):
        return line(self.title, self.what, self.calls, count(self.proxied), sequences(self.sequences), rules(self.rules))


@dataclass(frozen=True)
class Seen:
    """One run with images."""

    title: str
    version: str
    dialect: str
    what: str
    calls: int
    proxied: tuple
    sequences: list
    rules: tuple

    def line(self):
        measured = (self.calls, count(self.proxied), sequences(self.sequences), rules(self.rules))
        return line(self.title, self.version, self.dialect, self.what, *measured)


DIRECTLY = {}
"""Name → how many turns extend the one before without the proxy: all are measured for the table only."""
ROWS = {}
"""Rows by name, shapes, and runs with images: the measurements of this test run."""
MISSING = {}
"""Title → why it was not run."""


def write(order, missing, path=TABLE):
    """Writes the table, its rows in this order."""
    found = [ROWS[name] for name in order if name in ROWS]
    text = HEAD + "".join(row.line() for row in found if isinstance(row, Row))
    text += STRUCTURES + "".join(row.line() for row in found if isinstance(row, Shape))
    text += PICTURES + "".join(row.line() for row in found if isinstance(row, Seen))
    if missing:
        text += NOT_RUN + "".join(line(title, why) for title, why in missing.items())
    Path(path).write_text(text, encoding="utf-8")

"""What the commands print: tables and verdicts, in colour where somebody looks at them, in whole lines where a program does."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokencache.client import SessionState
from tokencache.commands.bulk import Export
from tokencache.commands.checking import Checked
from tokencache.trajectories.verify import NOT_CHECKED

_NAMED = 5
"""So many sessions are named where there may be many."""

_MEGABYTE = 1_000_000


def output() -> Console:
    """The standard output: as wide as the terminal, or, where it is read by a program, as the lines are."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=10_000)


def sessions(console: Console, states: Sequence[SessionState]) -> None:
    """Print a table of sessions, and how many there are."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("session", overflow="fold")
    for name in ("turns", "open", "incidents", "complete", "sealed", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    now = time.time()
    for state in states:
        missing = any(incident.hole for incident in state.incidents)
        table.add_row(
            Text(state.session),
            f"{state.turns:,}",
            Text(str(len(state.open_calls)), style="yellow" if state.open_calls else ""),
            Text(str(len(state.incidents)), style="red" if missing else "yellow" if state.incidents else ""),
            Text("yes", style="green") if state.complete else Text("no", style="red"),
            "yes" if state.sealed else "no",
            _age(now - state.created) if state.created else "-",
        )
    if states:
        console.print(table)
    incomplete = sum(not state.complete for state in states)
    console.print(plural(len(states), "session") + (f", {incomplete} incomplete" if incomplete else ""), highlight=False)


def exported(console: Console, export: Export, rows: int, to: str) -> None:
    """Say what was exported, and loudly what could not be."""
    where = "the standard output" if to == "-" else to
    words = (
        f"{plural(len(export.taken), 'session')} in {where}: {plural(rows, 'row')}, {export.tokens:,} tokens, {size(export.size)} fetched"
    )
    console.print(words, style="bold", highlight=False, markup=False, soft_wrap=True)
    for names, what, style in (
        (export.incomplete, "INCOMPLETE, something that the model said is missing (`tokencache show` says what)", "bold red"),
        (export.passed, "incomplete and left out", "yellow"),
        (export.gone, "deleted by others before they could be fetched", "yellow"),
        (export.kept if export.delete else (), "not deleted: a call is still open in them", "yellow"),
        (export.deleted, "deleted from the proxy", ""),
    ):
        if names:
            shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            console.print(f"{len(names)} {what}: {shown}", style=style, highlight=False, markup=False, soft_wrap=True)


def unfinished(console: Console, export: Export) -> None:
    """Say how far an export came that did not come to its end."""
    done = f"{len(export.taken)} of {plural(len(export.names), 'session')}"
    if export.whole:
        words = f"the file is whole; {plural(len(export.deleted), 'session')} deleted from the proxy before this stopped"
    elif export.partial is not None:
        words = f"stopped: {export.partial} holds {done}; nothing was deleted"
    else:
        words = f"stopped behind {done}; nothing was deleted"
    console.print(words, style="yellow", highlight=False, markup=False, soft_wrap=True)


def checked(console: Console, found: Sequence[Checked], *, most: int | None) -> None:
    """Print what was found, at most so many breaks of each target."""

    def say(words: str, style: str = "") -> None:
        # A file may say anything, and this goes to a terminal.
        safe = "".join(c if c.isprintable() or c == "\n" else " " for c in words)
        console.print(safe, style=style, highlight=False, markup=False, soft_wrap=True)

    for one in found:
        what = f"{plural(one.rollouts, 'rollout')}, {plural(one.turns, 'turn')}, {one.trainable_tokens:,} trainable tokens"
        if not one.breaks:
            say(f"{one.target}: {what}: all holds", "green")
        else:
            say(f"{one.target}: {what}: {plural(len(one.breaks), 'BREAK')}:", "bold red")
        for broken in one.breaks[:most]:
            say(f"  {broken}".replace("\n", "\n  "))
        if most is not None and len(one.breaks) > most:
            say(f"  and {len(one.breaks) - most} more: --all prints them")
        for session, why in one.incomplete.items():
            say(f"  incomplete: {session} ({', '.join(why)})", "yellow")
    say("not checked, for no export can show it:")
    for line in NOT_CHECKED:
        say(f"  {line}")


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def plural(n: int, what: str) -> str:
    """Write how many there are of something."""
    return f"{n:,} {what}{'' if n == 1 else 'S' if what.isupper() else 's'}"


def size(n: int) -> str:
    """Write a number of bytes for people."""
    return f"{n / _MEGABYTE:,.1f} MB" if n >= _MEGABYTE else f"{n / 1000:,.1f} KB"

"""`tokencache sessions`: lists the sessions of a proxy."""

import fnmatch
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokencache.client import Client, ClientError, SessionState
from tokencache.commands.console import PROXY_URL, AdminKeyOption, PatternOption, ProxyOption, failed, output, plural


def list_sessions(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only sessions whose names begin with this.", show_default=False)] = "",
    pattern: PatternOption = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array with one object for each session.")] = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """List the sessions of a proxy, newest first.

    "open" counts calls that have begun and not ended. A session is complete
    if no call is open and no reply of the model is missing.

    tokencache sessions run7-
    """
    try:
        with Client(proxy, admin_key) as client:
            states = [state for state in client.sessions(prefix) if fnmatch.fnmatchcase(state.session, pattern)]
    except ClientError as error:
        raise failed(error) from None
    states.sort(key=lambda state: (-state.created, state.session))
    if as_json:
        typer.echo(msgspec.json.encode(states))
    else:
        _print_table(output(), states)


def _print_table(console: Console, states: Sequence[SessionState]) -> None:
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


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"

"""`tokencache sessions`, `show`, `export` and `verify`: the trainer's work from a shell."""

import asyncio
import fnmatch
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tokencache.client import AsyncClient, Client, ClientError, SessionState
from tokencache.commands import files, printed, tree
from tokencache.commands.bulk import Export
from tokencache.commands.checking import check
from tokencache.errors import HarnessError
from tokencache.trajectories.formats.registry import FORMATS, format_named

_PROXY = "http://127.0.0.1:8100"
_PATIENCE = 600.0
"""Seconds to wait for one answer: a rollout may be large."""

_TOLD = 5
_INTERRUPTED = 130

_Proxy = Annotated[str, typer.Option("--proxy", envvar="TOKENCACHE_PROXY", help="base URL of the proxy, without /v1")]
_AdminKey = Annotated[
    str | None,
    typer.Option("--admin-key", envvar="TOKENCACHE_ADMIN_KEY", help="the key that the proxy was started with, if any", show_default=False),
]
_Pattern = Annotated[
    str,
    typer.Option("--pattern", help="only sessions whose names match this shell pattern: 'run7-*'", metavar="PATTERN", show_default=False),
]


def list_sessions(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="only sessions whose names begin with this", show_default=False)] = "",
    pattern: _Pattern = "*",
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON array, one object a session")] = False,
    proxy: _Proxy = _PROXY,
    admin_key: _AdminKey = None,
) -> None:
    """List the sessions of a proxy, newest first.

    "open" are calls that have begun and not ended. A session is complete
    when none is open and nothing that the model said is missing.

    tokencache sessions run7-
    """
    try:
        with Client(proxy, admin_key) as client:
            states = [state for state in client.sessions(prefix) if fnmatch.fnmatchcase(state.session, pattern)]
    except ClientError as why:
        raise _failed(why) from None
    states.sort(key=lambda state: (-state.created, state.session))
    if as_json:
        typer.echo(msgspec.json.encode(states))
    else:
        printed.sessions(printed.output(), states)


def show_session(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="which session; `tokencache sessions` lists them")],
    turns: Annotated[bool, typer.Option("--turns", help="show every turn: do not fold runs that just go on")] = False,
    proxy: _Proxy = _PROXY,
    admin_key: _AdminKey = None,
) -> None:
    """Show a session as a tree of turns.

    The tree shows which turn continues which, and why a rollout split.
    A line a turn: how its prompt came about, tokens that were new in it,
    tokens sampled, finish reason, and what is noteworthy: a reason, marks
    (aborted, no-logprobs, ...), an incident, rules by which a changed history
    was recognised.

    tokencache show r17
    """
    try:
        with Client(proxy, admin_key, timeout=_PATIENCE) as client:
            rollout = client.session(session).fetch()
    except ClientError as why:
        raise _failed(why) from None
    console = printed.output()
    for line in tree.lines(rollout, unfold=turns):
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def export_sessions(  # noqa: PLR0917 - one parameter per option
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="FILE", help="FILE.jsonl, FILE.jsonl.gz or FILE.parquet; - is the standard output", show_default=False
        ),
    ],
    sessions: Annotated[list[str] | None, typer.Argument(metavar="SESSION", help="which sessions", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", help="all sessions that there are")] = False,
    pattern: _Pattern = "",
    format_name: Annotated[str, typer.Option("--format", help=f"one of: {', '.join(FORMATS)}")] = "native",
    drift: Annotated[str, typer.Option("--drift", help="measure drift first: off, sequences (the last turn of each) or turns")] = "off",
    seal: Annotated[bool, typer.Option("--seal", help="seal each session before it is fetched: it takes no more calls")] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="seal, and delete each session from the proxy once the whole file is on the disk")
    ] = False,
    complete_only: Annotated[bool, typer.Option("--complete-only", help="leave out sessions that are incomplete")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it is there")] = False,
    proxy: _Proxy = _PROXY,
    admin_key: _AdminKey = None,
) -> None:
    """Export sessions into one file, to train on or to keep.

    JSON lines hold a rollout a line (native), or a training sample a line
    (other formats). Parquet holds a sample a row, ids as int32 and log
    probabilities as float32 (needs the extra 'parquet').

    The file gets its name when all is in it. If the export is interrupted,
    FILE.part holds what was fetched, and nothing was deleted.

    tokencache export --all --to rollouts.jsonl

    tokencache export --pattern 'run7-*' --format trl --to run7.parquet --delete
    """
    if sum((bool(sessions), everything, bool(pattern))) != 1:
        raise typer.BadParameter("name sessions, or say --all, or --pattern 'run7-*'", param_hint="SESSION")
    if delete and to == "-":
        raise typer.BadParameter("the standard output may be lost; --delete wants a file", param_hint="--delete")
    try:
        wanted = format_named(format_name)
        with Client(proxy, admin_key) as client:
            names = list(dict.fromkeys(sessions)) if sessions else _matching(client.sessions(), pattern or "*")
        if not names:
            raise _failed(ValueError(f"there is no session {f'that matches {pattern}' if pattern else 'yet'}; nothing was written"))
        export = Export(
            names=names,
            format=wanted.name,
            drift=drift,
            exact=bool(sessions),
            seal=seal,
            delete=delete,
            complete_only=complete_only,
        )
        sink = files.create(to, wanted, overwrite=overwrite)
    except (ClientError, HarnessError, files.FileError, OSError) as why:
        raise _failed(why) from None
    console = Console(stderr=True)
    try:
        asyncio.run(_export(export, sink, proxy, admin_key, console))
    except (ClientError, files.FileError, OSError) as why:
        printed.unfinished(console, export)
        raise _failed(why) from None
    except KeyboardInterrupt:
        printed.unfinished(console, export)
        raise typer.Exit(_INTERRUPTED) from None
    printed.exported(console, export, sink.rows, to)


def verify_exports(
    targets: Annotated[list[str], typer.Argument(metavar="SESSION|FILE", help="sessions of a proxy, or files of native exports")],
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON array, one object a target")] = False,
    every: Annotated[bool, typer.Option("--all", help=f"print every break, not only the first {_TOLD} of a target")] = False,
    proxy: _Proxy = _PROXY,
    admin_key: _AdminKey = None,
) -> None:
    """Check exported rollouts. The exit code is 1 if a check fails.

    Files are .jsonl, .jsonl.gz, .parquet, or .json with one rollout; all else
    is taken for a session and fetched. Checked are lengths, masks, log
    probabilities, the hashes of all ids, which turn stands behind which, that
    each turn is there once, weights and figures. The first break comes first,
    with ten tokens on either side.

    tokencache verify rollouts.jsonl

    tokencache verify r17
    """
    found = []
    try:
        with Client(proxy, admin_key, timeout=_PATIENCE) as client:
            found = [check(target, client) for target in targets]
    except (ClientError, files.FileError) as why:
        raise _failed(why) from None
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        printed.checked(printed.output(), found, most=None if every else _TOLD)
    if any(one.breaks for one in found):
        raise typer.Exit(1)


async def _export(export: Export, sink: files.Sink, proxy: str, admin_key: str | None, console: Console) -> None:
    columns = (TextColumn("exporting"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar: TaskID = progress.add_task("", total=len(export.names), told="")

        def step() -> None:
            progress.update(bar, advance=1, told=f"{export.tokens:,} tokens, {printed.size(export.size)}")

        async with AsyncClient(proxy, admin_key, timeout=_PATIENCE) as client:
            await export.run(client, sink, step)


def _matching(states: Sequence[SessionState], pattern: str) -> list[str]:
    """The sessions that match, oldest first."""
    chosen = [state for state in states if fnmatch.fnmatchcase(state.session, pattern)]
    return [state.session for state in sorted(chosen, key=lambda state: (state.created, state.session))]


def _failed(why: Exception) -> typer.Exit:
    typer.secho(f"tokencache: {why}", fg="red", err=True)
    return typer.Exit(1)

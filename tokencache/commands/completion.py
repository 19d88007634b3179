"""What a shell offers after TAB: harnesses, formats, and the sessions, groups and runs of the proxy that the command names.

Nothing is offered if the proxy does not answer within a second.
"""

import os
from collections.abc import Iterable

import typer

from tokencache.adapters.load import load_all
from tokencache.client import Client, ClientError, SessionState
from tokencache.commands.console import PROXY_URL
from tokencache.trajectories.formats.registry import FILE_FORMATS

_TIMEOUT = 1.0
_MOST = 200


def complete_harness(incomplete: str) -> list[str]:
    """List the harnesses that have an adapter."""
    return _beginning(load_all(), incomplete)


def complete_format(incomplete: str) -> list[str]:
    """List the formats of exports."""
    return _beginning(FILE_FORMATS, incomplete)


def complete_session(ctx: typer.Context, incomplete: str) -> list[str]:
    """List the newest sessions whose names begin so."""
    return [state.session for state in _sessions(ctx, incomplete)]


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """List the groups of the newest sessions that begin so."""
    return _beginning({state.group for state in _sessions(ctx) if state.group}, incomplete)


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """List the runs whose ids begin so."""
    try:
        with _client(ctx) as client:
            return [one.run for one in client.runs() if one.run.startswith(incomplete)]
    except ClientError:
        return []


def _sessions(ctx: typer.Context, prefix: str = "") -> list[SessionState]:
    try:
        with _client(ctx) as client:
            return client.page(prefix, limit=_MOST).sessions
    except ClientError:
        return []


def _client(ctx: typer.Context) -> Client:
    def given(option: str) -> str | None:
        return ctx.params.get(option) or os.environ.get(f"TOKENCACHE_{option.upper()}")

    return Client(given("proxy") or PROXY_URL, given("admin_key"), timeout=_TIMEOUT)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


SESSION = typer.Argument(metavar="SESSION", help="Name of the session; `tokencache sessions` lists them.", autocompletion=complete_session)
SESSIONS = typer.Argument(metavar="SESSION", help="Names of sessions; `tokencache sessions` lists them.", autocompletion=complete_session)
"""The arguments that name sessions of the proxy."""

"""Reads rollouts for a command: from files of native exports, and from sessions of a proxy."""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from tokencache.client import Client, NotFoundError
from tokencache.commands import files
from tokencache.commands.completion import complete_session
from tokencache.commands.console import TIMEOUT
from tokencache.commands.sink import FileError
from tokencache.trajectories.digest import digest_of, recorded_digest

TargetsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="SESSION|FILE", help="Sessions of a proxy, or files of native exports.", autocompletion=complete_session),
]
EngineOption = Annotated[str, typer.Option("--engine", metavar="URL", help="The engine's own URL, not the proxy's.")]
EngineKeyOption = Annotated[
    str | None, typer.Option("--engine-key", envvar="TOKENCACHE_ENGINE_KEY", metavar="KEY", help="API key of the engine, if it has one.")
]
RequestsOption = Annotated[
    int,
    typer.Option(
        "--max-requests-at-once",
        min=1,
        metavar="N",
        help="Requests in progress. 1 for a CPU build of vLLM with --enable-lora, which dies of more.",
    ),
]
AtOnceOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens-at-once",
        min=1,
        metavar="N",
        help="Tokens in progress, and the longest sequence. [default: 65536; with score --top K that / (K + 1)]",
    ),
]


class RolloutSource(NamedTuple):
    """Where rollouts are read: `where` names the place in messages; `value` is decoded JSON."""

    where: str
    value: Any


def check_targets(targets: Sequence[str], *, everything: bool, pattern: str) -> None:
    """Check that exactly one way of naming rollouts is used. Raises `typer.BadParameter` if none is, or several are."""
    if sum((bool(targets), everything, bool(pattern))) != 1:
        raise typer.BadParameter("give sessions or files, or --all, or --pattern 'run7-*'", param_hint="SESSION|FILE")


def read_targets(targets: Sequence[str], pattern: str, proxy: str, admin_key: str | None) -> Iterator[RolloutSource]:
    """Read rollouts one after the other. Without `targets`, the sessions whose names match `pattern` are read, oldest first.

    Of the latter those are left out that were deleted since they were listed.

    Raises:
        ClientError: there is no such session, or the proxy does not answer.
        FileError: a file cannot be read, or was changed after it was exported.
    """
    with Client(proxy, admin_key, timeout=TIMEOUT) as client:  # connects only when it is used
        for name in targets or session_names(client, pattern):
            if targets and files.is_file(name):
                for place, value in files.read(Path(name)):
                    where = f"{name}, number {place}"
                    if isinstance(value, dict) and (recorded := recorded_digest(value)) and recorded != digest_of(value):
                        raise FileError(f"{where} was changed after it was exported; see `tokencache verify`")
                    yield RolloutSource(where, value)
                continue
            with unless_deleted(named=bool(targets)):
                yield RolloutSource(f"session {name}", msgspec.json.decode(client.session(name).fetch_json(drift="off")))


def unless_deleted(*, named: bool) -> AbstractContextManager[None]:
    """Pass over a session that was deleted since it was listed. One that the user `named` must be there."""
    return nullcontext() if named else suppress(NotFoundError)


def session_names(client: Client, pattern: str) -> list[str]:
    """Return the names of the sessions that match a pattern, oldest first. Raises `ClientError` if the proxy does not answer."""
    chosen = [state for state in client.sessions() if fnmatch.fnmatchcase(state.session, pattern)]
    return [state.session for state in sorted(chosen, key=lambda state: (state.created, state.session))]

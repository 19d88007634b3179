"""Reads the file of `tokencache score --edit`, and the turns of sessions under its edits.

The file has JSON objects, one a line: `{"edits": […]}` for all sessions, or `{"session": "r1", "edits": […], "turns": […]}` for one.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tokencache.client import Client
from tokencache.commands import files
from tokencache.commands.console import TIMEOUT
from tokencache.commands.rollouts import session_names, unless_deleted
from tokencache.commands.sink import FileError
from tokencache.core.context_edits import Edit
from tokencache.scoring.rows import Row, row_of_turn


class SessionEdits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The edits of a session (`""`: of each that has none of its own), and the ids of the turns to score; empty for all."""

    edits: list[Edit]
    session: str = ""
    turns: list[str] = []


def read_edits(path: Path) -> dict[str, SessionEdits]:
    """Read a file of edits. Returns them by session.

    Raises:
        FileError: the file cannot be read, or an object is none of edits; the message names its number and the member.
    """
    found: dict[str, SessionEdits] = {}
    for number, value in files.read(path):
        try:
            one = msgspec.convert(value, SessionEdits)
        except msgspec.ValidationError as error:
            raise FileError(f"{path}, number {number}: {error}") from None
        if one.session in found:
            raise FileError(f"{path}, number {number}: {f'session {one.session}' if one.session else 'all sessions'} has edits already")
        found[one.session] = one
    return found


def edited_rows(
    edits: Mapping[str, SessionEdits], sessions: Sequence[str], pattern: str, proxy: str, admin_key: str | None
) -> Iterator[Row]:
    """Read the turns of sessions under edits, as the proxy proves them. Without `sessions`, they are chosen as in `read_targets`.

    Raises:
        ClientError: there is no such session, the proxy does not answer, or it refuses an edit.
        FileError: a target is a file, which has no messages, or a session has no edits.
    """
    if named := next(filter(files.is_file, sessions), None):
        raise FileError(f"{named}: a file of rollouts has no messages to edit; name sessions of a running proxy")
    with Client(proxy, admin_key, timeout=TIMEOUT) as client:
        for name in sessions or session_names(client, pattern):
            wanted = edits.get(name) or edits.get("")
            if wanted is None:
                raise FileError(f"session {name}: the file of edits has none for it, and none for all sessions (without `session`)")
            with unless_deleted(named=bool(sessions)):
                found = client.session(name).score(msgspec.to_builtins(wanted.edits), turns=wanted.turns, score=False)
                yield from (row_of_turn(found.session, turn) for turn in found.turns)

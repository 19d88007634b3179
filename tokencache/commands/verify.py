"""`tokencache verify`: checks exported files, or sessions of a proxy."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from tokencache.batching.forest_check import verify_forest
from tokencache.client import Client, ClientError
from tokencache.commands import files
from tokencache.commands.completion import complete_session
from tokencache.commands.console import (
    PROXY_URL,
    AdminKeyOption,
    ProxyOption,
    connecting,
    failed,
    output,
    plural,
    print_json,
    print_line,
)
from tokencache.commands.sink import FileError
from tokencache.trajectories.verify import NOT_CHECKED, CheckFailure, holes
from tokencache.trajectories.verify_rows import verify_row

if TYPE_CHECKING:
    from tokencache.commands.parquet import Inspection

_SHOWN = 5
_OF_ROW = frozenset({"readable", "digest"})
"""Checks of a line as a whole. Their failures name its number."""


class Checked(msgspec.Struct, kw_only=True):
    """The result for one file or session.

    Attributes:
        rows: lines of the file. `rollouts`: those that are native rollouts.
        read: whether the tokens were checked. Of a format that keeps them in messages, and of a Parquet file in another format than
            `native`, only the digest is compared.
        without_digest: lines that an older version wrote. A change of their text would not be found.
        incomplete: rollouts with missing data, and the kinds of incidents that report it.
        breaks: the failed checks.
    """

    target: str
    rows: int = 0
    rollouts: int = 0
    read: bool = True
    without_digest: int = 0
    turns: int = 0
    trainable_tokens: int = 0
    incomplete: dict[str, list[str]] = {}
    breaks: list[CheckFailure] = []


def verify_exports(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="SESSION|FILE", help="Sessions of a proxy, or files of native exports.", autocompletion=complete_session),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array with one object for each target.")] = False,
    every: Annotated[bool, typer.Option("--all", help=f"Print all failed checks, not only the first {_SHOWN} of a target.")] = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Check exported rollouts. The exit code is 1 if a check fails.

    Files end with .jsonl, .jsonl.gz, .parquet, or .json (one rollout). Any
    other name is a session, which is fetched. The checks cover lengths, masks,
    log probabilities, the hashes of all ids, the order of turns, that each
    turn occurs once, weights and figures. The first failure is printed first,
    with ten tokens on either side.

    tokencache verify rollouts.jsonl

    tokencache verify r17
    """
    try:
        with connecting(proxy, admin_key) as connect:
            checked = [check(target, connect) for target in targets]
    except (ClientError, FileError) as error:
        raise failed(error) from None
    if as_json:
        print_json(checked, indent=-1)
    else:
        _print_report(output(), checked, most=None if every else _SHOWN)
    if any(one.breaks for one in checked):
        raise typer.Exit(1)


def check(target: str, connect: Callable[[], Client]) -> Checked:
    """Check a file, or else the session of that name.

    Raises:
        FileError: the file cannot be read.
        ClientError: there is no such session, or the proxy does not answer.
    """
    if files.is_file(target):
        table = files.inspect(Path(target))
        return _check_all(target, files.read(Path(target))) if table is None else _check_table(target, table)
    return _check_all(target, [(1, msgspec.json.decode(connect().session(target).fetch_json(drift="off")))])


def _check_table(target: str, table: "Inspection") -> Checked:
    """Check a Parquet file. The rows of formats other than `native` are checked by their digest alone."""
    if table.native:
        checked = _check_all(target, files.read(Path(target)))
    else:
        checked = Checked(target=target, rows=table.rows, read=False, without_digest=table.rows if table.genuine is None else 0)
    if table.genuine is False:
        checked.breaks.append(CheckFailure(session="", check="digest", words="the rows of the file are not those that were written"))
    return checked


def _check_all(target: str, rollouts: Iterable[tuple[int, Any]]) -> Checked:
    checked = Checked(target=target)
    first_place: dict[tuple[str, str], int] = {}
    for place, value in rollouts:
        row = verify_row(value)
        checked.rows += 1
        checked.turns += row.turns
        checked.trainable_tokens += row.trainable_tokens
        checked.without_digest += not row.has_digest
        checked.breaks += [
            msgspec.structs.replace(one, words=f"number {place} {one.words}") if one.check in _OF_ROW else one for one in row.failures
        ]
        for session, sequence in row.parts:
            first = first_place.setdefault((session, sequence), place)
            if first != place:
                words = f"occurs twice: number {first} and number {place}"
                checked.breaks.append(CheckFailure(session=session, check="once", words=words, sequence=sequence))
        rollout = row.trajectory
        if rollout is None:
            continue
        checked.rollouts += 1
        if not row.failures:
            checked.breaks += verify_forest(rollout)
        if not rollout.complete:
            checked.incomplete[rollout.session] = list(holes(rollout))
    checked.read = bool(checked.rollouts or checked.turns)
    if not checked.rows:
        checked.breaks.append(CheckFailure(session="", check="readable", words="contains no rollout"))
    return checked


def _print_report(console: Console, checked: Sequence[Checked], *, most: int | None) -> None:
    """Print the results, with at most `most` failed checks for each target."""

    def line(words: str, style: str = "") -> None:
        print_line(console, words, style)

    for one in checked:
        line(*_result(one))
        for failure in one.breaks[:most]:
            line(f"  {failure}".replace("\n", "\n  "))
        if most is not None and len(one.breaks) > most:
            line(f"  and {len(one.breaks) - most} more: --all prints them")
        if one.without_digest:
            words = "without a digest, from an older version or another tool: a change of their words would not be found"
            line(f"  {one.without_digest} {words}", "yellow")
        for session, kinds in one.incomplete.items():
            line(f"  incomplete: {session} ({', '.join(kinds)})", "yellow")
    line("not checked, because an export cannot show it:")
    for words in NOT_CHECKED:
        line(f"  {words}")


def _result(checked: Checked) -> tuple[str, str]:
    """Return the first line about a target, and its style."""
    what = plural(checked.rollouts, "rollout") if checked.rollouts == checked.rows else plural(checked.rows, "row")
    if checked.read:
        what += f", {plural(checked.turns, 'turn')}, {checked.trainable_tokens:,} trainable tokens"
    if checked.breaks:
        return f"{checked.target}: {what}: {plural(len(checked.breaks), 'check')} FAILED:", "bold red"
    if checked.read:
        return f"{checked.target}: {what}: all checks passed", "green"
    if checked.without_digest:
        return f"{checked.target}: {what}: NOT checked", "yellow"
    return f"{checked.target}: {what}: as they were written, by their digest; what they hold was not checked", "yellow"

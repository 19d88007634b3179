"""`tokencache drift`: a report over many sessions, from files or from a proxy."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tokencache.client import Client, ClientError, Trajectory
from tokencache.commands.drift.show import print_rates
from tokencache.commands.files import JSON, JSONL, PARQUET, FileError, read
from tokencache.errors import extra_missing
from tokencache.trajectories.drift_rates import DriftRates, drift_rates, total

_HOW = (
    "no turn in it was measured. Measure every turn (or with `sequences` the last one of each sequence) when you export:\n"
    "  tokencache export --all --drift turns --to rollouts.jsonl"
)
_TIMEOUT = 120.0


class DriftError(Exception):
    """There is nothing to report; the message says why, and what to do."""


def report_drift(  # noqa: PLR0917 - one parameter per option
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE", help="native exports (.jsonl, .jsonl.gz, .parquet, .json) or directories of them; with --proxy: sessions"
        ),
    ],
    proxy: Annotated[str, typer.Option(help="measure sessions at this proxy, by name, instead of reading files")] = "",
    admin_key: Annotated[str, typer.Option(envvar="TOKENCACHE_ADMIN_KEY", help="the proxy's admin key")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON instead")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw them to this file, too (.svg or .png; needs the extra 'plot')")] = None,
    title: Annotated[str, typer.Option(help="above the picture")] = "",
) -> None:
    """Report the drift that plain rendering would have caused.

    The report lists drift per harness, model and cause, and its cost.

    Drift is measured where it can be: at the proxy, whose engine renders the harness's messages once more. A trajectory that
    was fetched with ?drift=turns says for each turn where its prompt differs and why; ?drift=sequences (the default) says it
    of the last turn of each sequence. What the words mean: docs/drift.md.
    """
    try:
        found = _measured(files, _live(proxy, admin_key, files) if proxy else _stored(files))
        if as_json:
            sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode({"rates": found, "total": total(found)})) + b"\n")
        else:
            print_rates(Console(), found)
        if plot is not None:
            _draw(found, plot, title)
    except (DriftError, FileError, ClientError) as why:
        typer.secho(f"tokencache drift: {why}", fg="red", err=True)
        raise typer.Exit(1) from None


def _measured(names: Iterable[str], trajectories: Iterable[Trajectory]) -> list[DriftRates]:
    found = drift_rates(trajectories)
    if not found:
        raise DriftError(f"{', '.join(names)}: holds no turn")
    if not any(row.measured for row in found) and any(row.could_drift for row in found):
        raise DriftError(f"{', '.join(names)}: {_HOW}")
    return found


def _stored(names: Iterable[str]) -> Iterator[Trajectory]:
    for name in names:
        path = Path(name)
        inside = (
            sorted(one for one in path.iterdir() if one.name.endswith((JSONL, f"{JSONL}.gz", PARQUET, JSON))) if path.is_dir() else [path]
        )
        if not inside:
            raise DriftError(f"{name}: a directory without exports")
        for each in inside:
            for place, value in read(each):
                try:
                    yield msgspec.convert(value, Trajectory)
                except msgspec.ValidationError as why:
                    raise DriftError(f"{each}, {place}: no native trajectory: {why}") from None


def _live(proxy: str, admin_key: str, sessions: Iterable[str]) -> Iterator[Trajectory]:
    with Client(proxy, admin_key or None, timeout=_TIMEOUT) as client:
        for session in sessions:
            yield client.session(session).fetch(drift="turns")


def _draw(found: list[DriftRates], path: Path, title: str) -> None:
    try:
        from tokencache.commands.drift.plot import draw  # noqa: PLC0415 - needs the extra `plot`
    except ModuleNotFoundError as why:
        raise DriftError(extra_missing("--plot", "plot", why.name)) from None
    try:
        draw([row for row in found if row.measured], path, title)
    except (OSError, ValueError) as why:
        raise DriftError(f"{path}: {why}") from None

"""`tokencache drift`: reports the drift of many sessions, from files or from a proxy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokencache.client import Client, ClientError, Trajectory
from tokencache.commands.completion import complete_session
from tokencache.commands.console import PROXY_URL, AdminKeyOption, ProxyOption, connecting, failed, print_json, printable
from tokencache.commands.files import EXPORTS, is_file, read
from tokencache.commands.sink import FileError
from tokencache.errors import extra_missing
from tokencache.trajectories.drift_rates import DriftRates, drift_rates, total

_HOW_TO_MEASURE = (
    "no turn was measured. Measure all turns (or with `sequences` the last one of each sequence) when you export:\n"
    "  tokencache export --all --drift turns --to rollouts.jsonl"
)


class DriftError(Exception):
    """There is nothing to report. The message explains why, and what to do."""


def report_drift(  # noqa: PLR0917 - one parameter per option
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="SESSION|FILE",
            help="Sessions of a proxy, native exports (.jsonl, .jsonl.gz, .parquet, .json), or directories of exports.",
            autocompletion=complete_session,
        ),
    ],
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a picture (.svg or .png). Needs the extra 'plot'.")] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="Title of the picture.", show_default=False)] = "",
) -> None:
    """Report the drift that plain rendering would have caused.

    The report lists drift for each harness, model and cause, and its cost.

    The proxy measures drift: its engine renders the messages of the harness
    once more. A trajectory fetched with ?drift=turns contains for each turn
    where its prompt differs and why; with ?drift=sequences (the default) for
    the last turn of each sequence. docs/drift.md explains the terms.
    """
    try:
        with connecting(proxy, admin_key) as connect:
            rows = _measured(targets, _read(targets, connect))
        if as_json:
            print_json({"rates": rows, "total": total(rows)})
        else:
            print_rates(Console(), rows)
        if plot is not None:
            _draw(rows, plot, title)
    except (DriftError, FileError, ClientError) as error:
        raise failed(error, "tokencache drift") from None


def _measured(names: Iterable[str], trajectories: Iterable[Trajectory]) -> list[DriftRates]:
    rows = drift_rates(trajectories)
    if not rows:
        raise DriftError(f"{', '.join(names)}: contains no turn")
    if not any(row.measured for row in rows) and any(row.could_drift for row in rows):
        raise DriftError(f"{', '.join(names)}: {_HOW_TO_MEASURE}")
    return rows


def _read(targets: Iterable[str], connect: Callable[[], Client]) -> Iterator[Trajectory]:
    for target in targets:
        if is_file(target) or Path(target).exists():
            yield from _from_files(Path(target))
        else:
            yield connect().session(target).fetch(drift="turns")


def _from_files(path: Path) -> Iterator[Trajectory]:
    exports = sorted(one for one in path.iterdir() if one.name.endswith(EXPORTS)) if path.is_dir() else [path]
    if not exports:
        raise DriftError(f"{path}: a directory without exports")
    for export in exports:
        for place, value in read(export):
            try:
                yield msgspec.convert(value, Trajectory)
            except msgspec.ValidationError as error:
                raise DriftError(f"{export}, number {place}: not a native trajectory: {error}") from None


def _draw(rows: list[DriftRates], path: Path, title: str) -> None:
    try:
        from tokencache.commands.drift_plot import draw  # noqa: PLC0415 - needs the extra `plot`
    except ModuleNotFoundError as error:
        raise DriftError(extra_missing("--plot", "plot", error.name)) from None
    measured = [row for row in rows if row.measured]
    if not measured:
        raise DriftError("no turn was measured, because none follows another one: there is nothing to draw")
    try:
        draw(measured, path, title)
    except (OSError, ValueError) as error:
        raise DriftError(f"{path}: {error}") from None


def share(part: int, whole: int) -> str:
    """Write a share in percent; a dash if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def print_rates(console: Console, rows: Sequence[DriftRates]) -> None:
    """Print drift, causes and costs as tables that fit 80 columns without color. `rows` is not empty."""
    whole = total(rows)
    shown = [*rows, whole] if len(rows) > 1 else list(rows)
    drift = _table("Drift", "harness, model", "sessions", "turns", "drifted", "", "tokens", "")
    for row in shown:
        drift.add_row(_label(row.name), f"{row.sessions:,}", f"{row.measured:,}", f"{row.drifted:,}", share(row.drifted, row.measured),
                      f"{row.drifted_tokens:,}", share(row.drifted_tokens, row.prompt_tokens))  # fmt: skip
    console.print(drift)
    causes = _table("Causes", "harness, model", "cause", "turns", "", "sites", "tokens")
    for row in shown:
        for place, (name, cause) in enumerate(row.causes.items()):
            causes.add_row(
                _label("" if place else row.name),
                _label(name),
                f"{cause.turns:,}",
                share(cause.turns, row.measured),
                f"{cause.sites:,}",
                f"{cause.tokens:,}",
            )
    if causes.row_count:
        console.print(causes)
    cost = _table("Cost of a text-only path", "harness, model", "sequences", "with text alone", "trainable", "lost", "")
    for row in shown:
        if row.whole_sequences:
            cost.add_row(_label(row.name), f"{row.whole_sequences:,}", f"{row.text_only_sequences:,}", f"{row.trainable_tokens:,}",
                         f"{row.trainable_tokens_lost:,}", share(row.trainable_tokens_lost, row.trainable_tokens))  # fmt: skip
    if cost.row_count:
        console.print(cost)
    if whole.whole_sequences < whole.sequences:
        console.print(
            f"Of {whole.sequences:,} sequences {whole.whole_sequences:,} were measured at every turn. The cost is known only for these. "
            "Export with `--drift turns` to measure all.",
            style="yellow",
        )


def _label(name: str) -> Text:
    """Return a name of a file or a harness as it is, without markup."""
    return Text(printable(name))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        left = not place or column == "cause"
        table.add_column(column, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    return table

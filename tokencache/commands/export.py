"""`tokencache export`: writes many sessions into one file, in order, and a manifest beside it (`manifest`).

A few sessions are fetched at a time. The file gets its name only when it is complete. Sessions are deleted only after the file is on
the disk, and only if they cannot change any more: they were sealed before they were fetched and had no open call. Sessions that could not
be exported are counted and reported.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tokencache.client import AsyncClient, Client, ClientError, Conditions, NotFoundError, UnfinishedError
from tokencache.commands import files, manifest
from tokencache.commands.completion import complete_format, complete_session
from tokencache.commands.console import (
    PROXY_URL,
    TIMEOUT,
    AdminKeyOption,
    BlockSizeOption,
    PatternOption,
    ProxyOption,
    failed,
    plural,
    print_line,
    size,
)
from tokencache.commands.media import write_media
from tokencache.commands.options import given, takes
from tokencache.commands.rollouts import session_names
from tokencache.commands.sink import FileError, Sink
from tokencache.core.outcome import OutcomeKind
from tokencache.errors import HarnessError
from tokencache.trajectories.formats.registry import FILE_FORMATS, TRACES, file_format_named
from tokencache.trajectories.lengths import ExportOptions, ExportParameters, lengths_of, parameters_of
from tokencache.trajectories.values import ModelFigures, OverlongFigures, PlaceholderFigures, StaleFigures
from tokencache.wakeup import end

CONCURRENCY = 4
"""Sessions that are fetched at a time, and rollouts that are in memory."""

_EXIT_INTERRUPTED = 130
_NAMES_SHOWN = 5
_REPORTS = frozenset({"overlong", "stale", "placeholders", "models"})
"""Members of the figures that say what was left out."""

_LEFT_OUT = {
    "dropped": "longer than the limit: left out",
    "cut": "longer than the limit: cut after the last whole turn that fits",
    "masked": "longer than the limit: masked: nothing of them is trained",
    "stale": "left out: older than --max-lag allows",
    "unknown_lag": "left out: how old their policy versions are is not known",
    "placeholders": "left out: the model sampled tokens that stand for parts of images, which no trainer accepts (docs/images.md)",
    "unplaced_images": "masked: which of their tokens stand for images is not known (docs/images.md)",
    "other_models": "left out: of another model, or of one that is not trained",
}
"""What the report says of sequences that are not in the file, or not whole, by the names of the manifest."""


class FetchedRollout(msgspec.Struct, frozen=True):
    """A fetched rollout. `final`: whether it was sealed without open calls before the fetch. `failed`: whether it ended with a failure."""

    session: str
    rollout: bytes
    complete: bool
    final: bool
    failed: bool
    figures: "_Figures"
    harness: str
    model: str


class Export(msgspec.Struct, kw_only=True):
    """What to export, and what has been exported so far.

    Attributes:
        names: the sessions, in the order in which they are written.
        drift: the turns whose drift is measured first; `""` uses the default of the proxy.
        exact: whether the user named each session, so that a missing one is an error.
        exported, incomplete, failed: sessions that were written; those of them that are incomplete; those that ended with a failure.
        skipped: sessions that were left out: incomplete ones (`complete_only`), or all that are not valid (`valid_only`).
        gone: sessions that were deleted before they could be fetched.
        seal, delete, force: whether sessions are sealed first, and deleted afterwards; whether unfinished ones are sealed, too.
        deleted, kept: sessions that were deleted after the export; those that may still change, and so were neither sealed nor deleted.
        media: the folder that their images and other media are written to; `None` if they are not fetched. `with_media`: sessions that were
            not deleted, because their media would be lost.
        whole: whether the file is complete and has its name.
        partial: the file with the data of an unfinished export.
        lengths: limits for sequences. `left_out`: number of sequences that were left out, cut or masked, by the names of `_LEFT_OUT`.
        file: the file, if it gets a manifest. `figures`: sums of the figures of what was written, and its sessions by harness and model.
    """

    names: Sequence[str]
    format: str
    drift: str = ""
    lengths: ExportOptions = {}
    exact: bool = False
    seal: bool = False
    delete: bool = False
    force: bool = False
    complete_only: bool = False
    valid_only: bool = False
    media: Path | None = None
    exported: list[str] = []
    incomplete: list[str] = []
    failed: list[str] = []
    skipped: list[str] = []
    gone: list[str] = []
    deleted: list[str] = []
    kept: list[str] = []
    with_media: list[str] = []
    tokens: int = 0
    left_out: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(_LEFT_OUT, 0))
    size: int = 0
    whole: bool = False
    partial: Path | None = None
    file: Path | None = None
    figures: dict[str, Any] = {}

    async def run(self, client: AsyncClient, sink: Sink, step: Callable[[], None]) -> None:
        """Export. `step` is called after each session.

        Raises:
            ClientError: the proxy refuses or does not answer.
            FileError: the file cannot hold a rollout.
            OSError: the file cannot be written.
        """
        final: list[str] = []
        conditions = await _conditions(client) if self.file is not None else None
        try:
            async with aclosing(self._fetch_all(client)) as fetched:
                async for name, rollout in fetched:
                    if rollout is not None and self._write(rollout, sink):
                        (final if rollout.final else self.kept).append(name)
                    elif rollout is None:
                        self.gone.append(name)
                    step()
            sink.finish()
            self.whole = True
        except BaseException:  # also KeyboardInterrupt and cancellation
            with suppress(OSError):  # a disk that is full has no room for the end of the file either
                self.partial = sink.leave()
            raise
        if self.file is not None:
            manifest.write(self.file, conditions, self.contents(sink.rows))
        for name in final if self.delete else ():
            with suppress(NotFoundError):  # someone else deleted it
                if self.media is None and await client.session(name).media():
                    self.with_media.append(name)
                    continue
                await client.session(name).delete()
            self.deleted.append(name)

    def _write(self, fetched: FetchedRollout, sink: Sink) -> bool:
        if (not fetched.complete and (self.complete_only or self.valid_only)) or (fetched.failed and self.valid_only):
            self.skipped.append(fetched.session)
            return False
        sink.write(fetched.rollout)
        self.exported.append(fetched.session)
        if not fetched.complete:
            self.incomplete.append(fetched.session)
        if fetched.failed:
            self.failed.append(fetched.session)
        figures = fetched.figures
        self.tokens += figures.trainable_tokens + figures.masked_tokens
        manifest.add_up(self.left_out, figures.left_out())
        self.size += len(fetched.rollout)
        sums = {name: value for name, value in msgspec.to_builtins(figures).items() if name not in _REPORTS}
        manifest.add_up(self.figures, {**sums, "harnesses": {fetched.harness or "unknown": 1}, "models": {fetched.model or "unknown": 1}})
        return True

    def contents(self, rows: int) -> dict[str, Any]:
        """Describe for the manifest what was exported and what was left out; `rows` is the number of rows of the file."""
        options = {"drift": self.drift, "complete_only": self.complete_only, "valid_only": self.valid_only, **self.lengths}
        return {
            "format": self.format,
            "rows": rows,
            "options": options,
            "sessions": {
                "requested": len(self.names),
                "exported": len(self.exported),
                "incomplete": self.incomplete,
                "failed": self.failed,
                "left_out": self.skipped,
                "gone": self.gone,
            },
            "sequences_left_out": self.left_out,
            "figures": self.figures,
        }

    async def _fetch_all(self, client: AsyncClient) -> AsyncGenerator[tuple[str, FetchedRollout | None], None]:
        """Fetch all sessions, several at a time, and yield them in order; `None` for one that is gone."""
        names: Iterator[str] = iter(self.names)
        running: deque[tuple[str, asyncio.Task[FetchedRollout]]] = deque()
        try:
            while True:
                while len(running) < CONCURRENCY and (name := next(names, None)) is not None:
                    running.append((name, asyncio.create_task(self._fetch(client, name))))
                if not running:
                    return
                name, task = running.popleft()
                try:
                    fetched = await task
                except NotFoundError:
                    if self.exact:
                        raise
                    yield name, None
                else:
                    yield name, fetched
        finally:
            await end(*(task for _, task in running))

    async def _fetch(self, client: AsyncClient, name: str) -> FetchedRollout:
        session = client.session(name)
        if self.seal or self.delete:
            with suppress(UnfinishedError):  # it is exported as it is, and reported
                await session.seal(force=self.force)
        state = await session.state()
        if self.media is not None:
            await write_media(session, self.media)
        form = "native" if self.format in TRACES else self.format  # a trace is made here
        rollout = await session.fetch_json(form, drift=self.drift, **self.lengths)
        summary = msgspec.json.decode(rollout, type=_Summary)
        complete = state.complete if summary.complete is None else summary.complete
        figures = summary.figures or summary.info.tokencache.figures
        failed = (summary.outcome or summary.info.tokencache.outcome) != OutcomeKind.OK
        final = state.sealed and not state.open_calls
        return FetchedRollout(name, rollout, complete, final, failed, figures, state.harness, state.model)


async def _conditions(client: AsyncClient) -> Conditions | None:
    """Return the conditions of the proxy; `None` if it is older than the route."""
    with suppress(NotFoundError):
        return await client.conditions()
    return None


class _Figures(msgspec.Struct, frozen=True):
    calls: int = 0
    turns: int = 0
    sequences: int = 0
    trainable_tokens: int = 0
    masked_tokens: int = 0
    untrainable_tokens: int = 0
    matches: dict[str, int] = {}
    forgiven: dict[str, int] = {}
    incidents: dict[str, int] = {}
    versions: dict[str, int] = {}
    overlong: OverlongFigures | None = None
    stale: StaleFigures | None = None
    placeholders: PlaceholderFigures | None = None
    models: ModelFigures | None = None

    def left_out(self) -> dict[str, int]:
        """Return how many sequences were left out, cut or masked, by the names of `_LEFT_OUT`."""
        found: dict[str, int] = {}
        if self.overlong is not None:
            found |= {name: getattr(self.overlong, name) for name in ("dropped", "cut", "masked")}
        if self.stale is not None:
            found |= {"stale": self.stale.dropped, "unknown_lag": self.stale.unknown}
        if self.placeholders is not None:
            found |= {"placeholders": self.placeholders.dropped, "unplaced_images": self.placeholders.masked}
        if self.models is not None:
            found["other_models"] = sum(self.models.dropped.values())
        return found


class _Labels(msgspec.Struct, frozen=True):
    figures: _Figures = _Figures()
    outcome: str = OutcomeKind.OK


class _Info(msgspec.Struct, frozen=True):
    tokencache: _Labels = _Labels()


class _Summary(msgspec.Struct, frozen=True):
    """Members that most formats have. verifiers has figures and outcome in `info`, and no `complete`: the state of the session has it."""

    complete: bool | None = None
    outcome: str = ""
    figures: _Figures | None = None
    info: _Info = _Info()


@takes(ExportParameters)
def export_sessions(
    sessions: Annotated[
        list[str] | None, typer.Argument(metavar="SESSION", help="Names of sessions.", autocompletion=complete_session)
    ] = None,
    *,
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="FILE.jsonl, FILE.jsonl.gz or FILE.parquet; - is standard output.")],
    everything: Annotated[bool, typer.Option("--all", help="Export all sessions.")] = False,
    pattern: PatternOption = "",
    format_name: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help=f"One of: {', '.join(FILE_FORMATS)}.", autocompletion=complete_format)
    ] = "native",
    drift: Annotated[
        str, typer.Option("--drift", metavar="MODE", help="Measure drift first: off, sequences (the last turn of each) or turns (all).")
    ] = "off",
    seal: Annotated[bool, typer.Option("--seal", help="Seal each finished session before it is fetched.")] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Seal each finished session, and delete it from the proxy once the file is on the disk.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --seal or --delete: also sessions that are not finished. They become incomplete.")
    ] = False,
    complete_only: Annotated[bool, typer.Option("--complete-only", help="Leave out incomplete sessions.")] = False,
    valid_only: Annotated[bool, typer.Option("--valid-only", help="Leave out sessions that are incomplete or failed.")] = False,
    media: Annotated[
        Path | None,
        typer.Option("--media", metavar="DIR", help="Also write images and other media to this folder, as `tokencache media` does."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    block_size: BlockSizeOption = None,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
    **options: Any,
) -> None:
    """Export sessions into one file, to train on or to keep.

    JSON lines hold one rollout a line (native) or one training sample a line
    (other formats). Parquet holds one sample a row, ids as int32 and log
    probabilities as float32 (needs the extra 'parquet').

    The file gets its name when it is complete. If the export is interrupted,
    FILE.part holds what was fetched, and nothing is deleted.

    FILE.manifest.json says how the file was made: versions, settings,
    engines, figures, and what was left out.

    tokencache export --all --to rollouts.jsonl

    tokencache export --pattern 'run7-*' --format trl --to run7.parquet --delete
    """
    if sum((bool(sessions), everything, bool(pattern))) != 1:
        raise typer.BadParameter("give session names, or --all, or --pattern 'run7-*'", param_hint="SESSION")
    if delete and to == "-":
        raise typer.BadParameter("standard output may be lost: --delete needs a file", param_hint="--delete")
    if delete and format_name in TRACES:
        raise typer.BadParameter("a trace does not hold the rollouts: --delete needs another format", param_hint="--delete")
    try:
        wanted = file_format_named(format_name)
        lengths = cast("ExportOptions", given(ExportParameters, options))
        lengths_of(parameters_of(lengths))  # refuses a wrong combination before anything is fetched
        with Client(proxy, admin_key) as client:
            names = list(dict.fromkeys(sessions)) if sessions else session_names(client, pattern or "*")
        if not names:
            raise failed(f"there is no session {f'that matches {pattern}' if pattern else 'yet'}; nothing was written")
        export = Export(
            names=names,
            format=wanted.name,
            drift=drift,
            lengths=lengths,
            exact=bool(sessions),
            seal=seal,
            delete=delete,
            force=force,
            complete_only=complete_only,
            valid_only=valid_only,
            media=media,
            file=Path(to) if to != "-" else None,
        )
        sink = files.create(to, wanted, overwrite=overwrite, block_size=block_size)
    except (ClientError, HarnessError, FileError, OSError) as error:
        raise failed(error) from None
    console = Console(stderr=True)
    try:
        asyncio.run(_run(export, sink, proxy, admin_key, console))
    except (ClientError, FileError, OSError) as error:
        _print_unfinished(console, export)
        raise failed(error) from None
    except KeyboardInterrupt:
        _print_unfinished(console, export)
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    _print_report(console, export, sink.rows, to)


async def _run(export: Export, sink: Sink, proxy: str, admin_key: str | None, console: Console) -> None:
    columns = (TextColumn("exporting"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[amount]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(export.names), amount="")

        def step() -> None:
            progress.update(bar, advance=1, amount=f"{export.tokens:,} tokens, {size(export.size)}")

        async with AsyncClient(proxy, admin_key, timeout=TIMEOUT) as client:
            await export.run(client, sink, step)


def _print_report(console: Console, export: Export, rows: int, to: str) -> None:
    """Print what was exported and what was not."""
    where = "standard output" if to == "-" else to
    counts = f"{plural(rows, 'row')}, {export.tokens:,} tokens, {size(export.size)} fetched"
    print_line(console, f"{plural(len(export.exported), 'session')} in {where}: {counts}", "bold")
    for name, words in _LEFT_OUT.items():
        if count := export.left_out[name]:
            print_line(console, f"{plural(count, 'sequence')} {words}", "yellow")
    for names, words, style in (
        (export.incomplete, "INCOMPLETE: a reply of the model is missing (see `tokencache show`)", "bold red"),
        (export.failed, "FAILED: no trainer learns from them (see `tokencache sessions`)", "bold red"),
        (export.skipped, f"incomplete {'or failed, ' if export.valid_only else ''}and left out", "yellow"),
        (export.gone, "deleted by someone else before they could be fetched", "yellow"),
        (
            export.kept if export.seal or export.delete else (),
            f"not sealed{' and not deleted' if export.delete else ''}: not finished, or a call is in flight (finish it, or use --force)",
            "yellow",
        ),
        (export.with_media, "not deleted: they have images or other media, which would be lost (name a folder: --media DIR)", "yellow"),
        (export.deleted, "deleted from the proxy", ""),
    ):
        if names:
            shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            print_line(console, f"{len(names)} {words}: {shown}", style)


def _print_unfinished(console: Console, export: Export) -> None:
    """Print the progress of an export that failed or was interrupted."""
    done = f"{len(export.exported)} of {plural(len(export.names), 'session')}"
    if export.whole:
        words = f"the file is complete; stopped after {plural(len(export.deleted), 'session')} were deleted from the proxy"
    elif export.partial is not None:
        words = f"stopped: {export.partial} holds {done}; nothing was deleted"
    else:
        words = f"stopped after {done}; nothing was deleted"
    print_line(console, words, "yellow")

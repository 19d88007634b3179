"""`tokencache score`: the log probabilities of recorded sequences by any engine."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
import xxhash
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from tokencache.client import ClientError
from tokencache.commands import files
from tokencache.commands.console import PROXY_URL, AdminKeyOption, PatternOption, ProxyOption, failed, plural, print_line, said, size
from tokencache.commands.edits import edited_rows, read_edits
from tokencache.commands.options import given, takes
from tokencache.commands.rollouts import (
    AtOnceOption,
    EngineKeyOption,
    EngineOption,
    RequestsOption,
    RolloutSource,
    TargetsArgument,
    check_targets,
    read_targets,
)
from tokencache.commands.sink import FileError, part_of
from tokencache.scoring.engine import REQUESTS_AT_ONCE, EngineLostError, ScoringEngine
from tokencache.scoring.journal import ENDING, Journal, JournalError
from tokencache.scoring.request import default_tokens_at_once
from tokencache.scoring.rows import Row, Wanted, rows_of_value
from tokencache.scoring.score import ScoreRun, score_rows
from tokencache.trajectories.formats.registry import Format

_SHOWN = 5

_ROWS = Format("scores", "one row for each sequence", lambda _: {}, "")


class _Files(NamedTuple):
    to: Path
    journal: Path
    resume: bool
    edits: str = ""
    """A hash of the file of edits; `""` without one."""


@takes(Wanted)
def score_rollouts(
    targets: TargetsArgument = None,
    *,
    engine: EngineOption,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="FILE.jsonl, FILE.jsonl.gz or FILE.parquet.")],
    everything: Annotated[bool, typer.Option("--all", help="Score every session of the proxy.")] = False,
    pattern: PatternOption = "",
    edit: Annotated[Path | None, typer.Option("--edit", metavar="FILE", help="Score each turn after edited messages: see above.")] = None,
    at_once: AtOnceOption = None,
    requests: RequestsOption = REQUESTS_AT_ONCE,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run, and try refused sequences again.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    engine_key: EngineKeyOption = None,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
    **options: Any,
) -> None:
    """Score recorded sequences with any engine.

    The engine returns the log probability of each recorded token id: a
    reference or teacher model for KL and distillation, the current policy
    for importance ratios. The file has a row for each sequence, in the order
    of the input: token_ids, loss_mask, the recorded logprobs, and score. A
    file of scores can be scored again, with another --name.

    --edit FILE scores each turn of sessions as if messages before its reply
    were others, such as with a hint. Every reply that the model sampled keeps
    its exact ids; the proxy renders the rest and proves it, or refuses the
    turn (edit_error). FILE has JSON objects, one a line:

    {"edits": [{"at": 1, "insert": [{"role": "user", "content": "Hint: …"}]}]}

    insert puts messages before the message at this place, replace puts them
    in its place. 0 is the first message of a turn's request, -1 the last;
    without at, they come directly before the reply. With "session": "r1" an
    object is for that session only, and with "turns": ["…"] for those turns.

    A sequence that the engine refuses has no score; the others do, and the
    exit code is 1. FILE.scored holds what is done until all is: --resume.

    tokencache score rollouts.jsonl --engine http://gpu2:8000 --to kl.parquet

    tokencache score r1 --edit hint.json --engine http://gpu2:8000 --to hinted.jsonl
    """
    chosen = targets or []
    check_targets(chosen, everything=everything, pattern=pattern)
    journal = to.with_name(to.name + ENDING)
    wanted = Wanted(**given(Wanted, options))
    console = Console(stderr=True)
    try:
        _check_files(to, journal, resume=resume, overwrite=overwrite)
        if edit is None:
            rows = _rows(read_targets(chosen, pattern or "*", proxy, admin_key))
        else:
            rows = edited_rows(read_edits(edit), chosen, pattern or "*", proxy, admin_key)
        edits = xxhash.xxh3_128_hexdigest(edit.read_bytes()) if edit is not None else ""
        scoring = ScoringEngine(engine, engine_key, tokens_at_once=at_once or default_tokens_at_once(wanted.top), requests_at_once=requests)
        run, refused = asyncio.run(_run(scoring, rows, _Files(to, journal, resume, edits), wanted, console))
    except (ClientError, FileError, JournalError, EngineLostError, OSError) as error:
        raise failed(f"{said(error)}{_advice(journal, resume=resume)}") from None
    except KeyboardInterrupt:
        raise failed(f"interrupted{_advice(journal, resume=resume)}") from None
    each = f", {run.size // run.tokens} bytes a token" if run.tokens else ""
    done = f"{plural(len(run.keys) - len(refused), 'sequence')} in {to}, {run.tokens:,} tokens scored{each}"
    print_line(console, f"{done}{f', {run.kept} kept from an earlier run' if run.kept else ''}")
    if refused:
        for key, why in list(refused.items())[:_SHOWN]:
            print_line(console, f"  {key.rpartition('/')[0]}: {why}", "yellow")
        raise failed(f"{plural(len(refused), 'sequence')} without a score (null in the file); {journal} is kept: --resume tries them again")
    journal.unlink()


def _check_files(to: Path, journal: Path, *, resume: bool, overwrite: bool) -> None:
    """Check that the result can be written, before anything is scored. Raises `FileError` if it cannot; the message says what to do."""
    if not to.name.endswith((files.JSONL, files.GZIP, files.PARQUET)):
        raise FileError(f"{to}: the name must end with {files.JSONL}, {files.GZIP} or {files.PARQUET}")
    if not to.parent.is_dir():
        raise FileError(f"{to}: there is no directory {to.parent}")
    if to.suffix == files.PARQUET:
        files.require_parquet()
    if journal.exists() and not resume:
        raise FileError(f"{journal} is there: a run was not finished; --resume continues it (or remove the file)")
    if to.exists() and not overwrite and not journal.exists():
        raise FileError(f"{to} exists already: choose another name, or use --overwrite")


def _advice(journal: Path, *, resume: bool) -> str:
    return "" if resume or not journal.exists() else f"; {journal} holds what is done: --resume continues"


def _rows(targets: Iterator[RolloutSource]) -> Iterator[Row]:
    for target in targets:
        try:
            yield from rows_of_value(target.value)
        except ValueError as error:
            raise FileError(f"{target.where}: neither a native rollout nor a row of scores: {error}") from None


async def _run(
    engine: ScoringEngine, rows: Iterator[Row], paths: _Files, wanted: Wanted, console: Console
) -> tuple[ScoreRun, dict[str, str]]:
    """Score, and write the result. Returns the figures, and why the refused rows have no score."""
    columns = (TextColumn("scoring"), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None, amount="")

        def step(run: ScoreRun) -> None:
            progress.update(bar, amount=f"{plural(len(run.keys), 'sequence')} read, {run.tokens:,} tokens scored, {size(run.size)}")

        async with engine:
            named = msgspec.structs.replace(wanted, model=engine.model(wanted.model or None), version=await engine.weight_version())
            settings = {"engine": engine.url, "edits": paths.edits, **msgspec.structs.asdict(named)}
            with Journal(paths.journal, settings, resume=paths.resume) as journal:
                run = await score_rows(rows, engine, journal, named, step)
                if (now := await engine.weight_version()) != named.version:
                    changed = f"the engine's weights changed from version {named.version!r} to {now!r} meanwhile"
                    raise EngineLostError(f"{changed}: remove {paths.journal}, and score again while they stay the same")
                if not run.keys:
                    raise FileError("there is no sequence to score; nothing was written")
                _write(paths.to, run, journal)
                return run, {key: journal.failed[key] for key in run.keys if key in journal.failed}


def _write(to: Path, run: ScoreRun, journal: Journal) -> None:
    """Write the rows in the order of the input. The file gets its name when it is complete."""
    sink = files.create(str(to), _ROWS, overwrite=True)
    try:
        for key in run.keys:
            sink.write(journal.row(key))
        sink.finish()
    except BaseException:
        with suppress(OSError):  # a disk that is full has no room for the end of the file either
            sink.leave()
        part_of(to).unlink(missing_ok=True)
        raise

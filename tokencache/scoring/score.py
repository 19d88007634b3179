"""Scores many sequences: several at a time, each kept in a journal as soon as it is done. A sequence that fails stops no other."""

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from tokencache.scoring.engine import ScoringEngine
from tokencache.scoring.journal import Journal
from tokencache.scoring.request import ScoringError
from tokencache.scoring.rows import Row, Wanted, key_of, scored, unscored

CONCURRENCY = 16
"""Requests in progress. The limit of tokens at once usually allows fewer."""


class ScoreRun(msgspec.Struct, kw_only=True):
    """Figures of a run.

    Attributes:
        keys: the keys of all rows, in the order of the input.
        kept: rows that the journal had from an earlier run.
        tokens: number of tokens that were scored. `size`: bytes of the replies for them.
    """

    keys: list[str] = []
    kept: int = 0
    tokens: int = 0
    size: int = 0


async def score_rows(
    rows: Iterable[Row], engine: ScoringEngine, journal: Journal, wanted: Wanted, step: Callable[[ScoreRun], None]
) -> ScoreRun:
    """Score all rows that are not in the journal. `step` is called after each row.

    Raises:
        EngineLostError: the engine does not answer any more. The journal holds what was done.
    """
    run = ScoreRun()
    free = asyncio.Semaphore(CONCURRENCY)

    async def score(key: str, row: Row) -> None:
        try:
            scores = await engine.score(row["token_ids"], wanted.model, top=wanted.top)
        except ScoringError as error:
            journal.append(key, unscored(row, wanted, str(error)), str(error))
        else:
            journal.append(key, scored(row, wanted, scores))
            run.tokens += len(row["token_ids"])
            run.size += scores.size
        finally:
            free.release()
        step(run)

    try:
        async with asyncio.TaskGroup() as tasks:
            for row in rows:
                key = key_of(row)
                run.keys.append(key)
                if key in journal:
                    run.kept += 1
                    step(run)
                    continue
                if error := row.get("edit_error") or row.get("media_error"):  # there is nothing to score
                    journal.append(key, unscored(row, wanted, error), error)
                    step(run)
                    continue
                await free.acquire()
                tasks.create_task(score(key, row))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return run

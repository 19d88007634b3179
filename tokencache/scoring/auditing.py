"""Runs an audit: measures the engine's noise floor, scores the sequences of rollouts, and compares them with what was recorded."""

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tokencache.scoring.audit import AuditedSpan, AuditSpan, Cause, NotAudited, causes, plan
from tokencache.scoring.differences import NoiseFloor, difference
from tokencache.scoring.engine import ScoringEngine
from tokencache.scoring.processed import Processing, explains, processing_of
from tokencache.scoring.request import MOST_TOP, OtherIdsError, Scores, ScoringError
from tokencache.trajectories.values import Trajectory

FLOOR_REPLIES, FLOOR_TOKENS, FLOOR_PROMPT = 3, 64, 1024
"""The replies that the engine samples to measure its floor, their length, and the most tokens of their prompts."""

_CONCURRENCY = 8


class AuditRun(msgspec.Struct, kw_only=True):
    """The result of an audit.

    Attributes:
        floor: how much the engine differs from itself.
        results: the audited spans, without their recorded values. `left_out`: what could not be audited.
        differences: the absolute differences of all audited tokens.
        rollouts: number of rollouts that were read.
    """

    floor: NoiseFloor = NoiseFloor()
    results: list[AuditedSpan] = []
    left_out: list[NotAudited] = []
    differences: "array[float]" = msgspec.field(default_factory=lambda: array("d"))
    rollouts: int = 0

    def causes(self, engine: ScoringEngine) -> dict[int, Cause]:
        """Return the causes of the differences that are no noise (`audit.causes`)."""
        return causes(self.results, (model.name for model in engine.models.values() if model.parent is not None))


async def audit_rollouts(
    rollouts: Iterable[Trajectory], engine: ScoringEngine, *, version: str | None, model: str | None, step: Callable[[AuditRun], None]
) -> AuditRun:
    """Audit rollouts. `version` is that of the engine's weights (`audit.plan`); `model` replaces the names that the turns have.

    Raises:
        EngineLostError: the engine does not answer any more.
        ScoringError: the engine's noise floor cannot be measured.
    """
    run = AuditRun()
    free = asyncio.Semaphore(_CONCURRENCY)

    async def audit(ids: list[int], spans: Sequence[AuditSpan], named: str) -> None:
        try:
            await _audit_sequence(run, engine, ids, spans, named)
        finally:
            free.release()
        step(run)

    try:
        async with asyncio.TaskGroup() as tasks:
            for rollout in rollouts:
                run.rollouts += 1
                spans, left_out = plan(rollout, version=version)
                run.left_out += left_out
                tokens = {sequence.id: sequence.token_ids for sequence in rollout.sequences}
                for (sequence, named), own in _groups(spans, model).items():
                    if named not in engine.models:
                        run.left_out += [_without(span, f"the engine does not serve the model {named}") for span in own]
                        continue
                    if not run.floor.replies:
                        run.floor = await _measure_floor(engine, tokens[sequence][: own[0].at - own[0].start], named)
                    await free.acquire()
                    tasks.create_task(audit(tokens[sequence], own, named))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return run


def _groups(spans: Iterable[AuditSpan], model: str | None) -> dict[tuple[str, str], list[AuditSpan]]:
    """Group spans by what is scored at once: their sequence, and the model that sampled them."""
    found: dict[tuple[str, str], list[AuditSpan]] = {}
    for span in spans:
        found.setdefault((span.sequence, model or span.model), []).append(span)
    return found


async def _measure_floor(engine: ScoringEngine, prompt: list[int], model: str) -> NoiseFloor:
    replies = []
    for _ in range(FLOOR_REPLIES):
        head = prompt[:FLOOR_PROMPT]
        reply = await engine.sample(head, model, FLOOR_TOKENS)
        scores = await engine.score([*head, *reply.ids], model)
        replies.append([abs(a - b) for a, b in zip(reply.logprobs, scores.logprobs[len(head) :], strict=True)])
    return NoiseFloor(replies)


async def _audit_sequence(run: AuditRun, engine: ScoringEngine, ids: list[int], spans: Sequence[AuditSpan], model: str) -> None:
    """Score a sequence as far as it is audited, and compare its spans."""
    needed = ids[: max(span.at + len(span.recorded) for span in spans)]
    try:
        scores = await engine.score(needed, model)
    except OtherIdsError:
        run.results += [AuditedSpan(span=_light(span), difference=None) for span in spans]
        return
    except ScoringError as error:
        run.left_out += [_without(span, str(error)) for span in spans]
        return
    likeliest: Scores | None = None
    for span in spans:
        own = scores.logprobs[span.at : span.at + len(span.recorded)]
        found, limit, mode = difference(span.recorded, own), run.floor.limit(len(own)), False
        run.differences.extend(abs(a - b) for a, b in zip(span.recorded, own, strict=True))
        if found.mean > limit and (processing := processing_of(span.sampling)) != Processing():
            likeliest = likeliest or await _likeliest(engine, needed, model)
            mode = likeliest is not None and explains(span.recorded, own, likeliest.top_logprobs[span.at :][: len(own)], processing)
        run.results.append(AuditedSpan(span=_light(span), difference=found, limit=limit, mode=mode))


async def _likeliest(engine: ScoringEngine, ids: list[int], model: str) -> Scores | None:
    """Return the likeliest tokens at each place; `None` if the engine refuses that."""
    try:
        return await engine.score(ids, model, top=MOST_TOP)
    except ScoringError:
        return None


def _light(span: AuditSpan) -> AuditSpan:
    """Return a span without its values, so that the audit of many rollouts fits into memory."""
    return msgspec.structs.replace(span, recorded=[])


def _without(span: AuditSpan, reason: str) -> NotAudited:
    return NotAudited(span.session, span.turn, span.start, span.end, reason)

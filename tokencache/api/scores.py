"""Handler of the route that scores the turns of a session under edits of the messages before their replies.

The prompts of a turn are rendered and proven by the session's engine of its model (`proxy.edited_context`), which also scores them.
Requests are served one at a time, so that they slow down no calls. A request that fails returns nothing of what it had found.

Each turn of the answer has its whole prompt, so the answer grows with the square of the session. Only the part of a prompt that no other
turn has is held in memory, and the answer is written one turn at a time.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from aiohttp import web

from tokencache.api.auth import AdminAuth
from tokencache.api.http import read_body
from tokencache.api.openapi import register
from tokencache.api.reader import SessionReader
from tokencache.api.requests import ScoreEdited
from tokencache.core import ids
from tokencache.core.context import Context, whole_contexts
from tokencache.core.context_edits import EditRefusal
from tokencache.core.lineage import lineages, training_values
from tokencache.core.turn import Tokens, Turn
from tokencache.core.weights import RESERVED
from tokencache.engine.model import Engine
from tokencache.engine.pool import Pool
from tokencache.errors import OK, EngineError, HarnessError
from tokencache.pauses import pause
from tokencache.proxy.edited_context import EditedContexts, EditRefusedError, RecordedTurn, check_edits
from tokencache.scoring.request import (
    Scores,
    ScoringError,
    default_tokens_at_once,
    read_scores,
    refusal_words,
    scoring_request,
)
from tokencache.trajectories.rollout import Records
from tokencache.trajectories.values import ScoredTurn

_PROMPT = b'"prompt_token_ids":['
LONGEST_SCORING = 600.0
"""Seconds for which an engine may compute one turn. A paused engine answers nothing."""


def add_score_route(app: web.Application, auth: AdminAuth, reader: SessionReader, contexts: EditedContexts, pool: Pool) -> None:
    """Add the route to an application."""
    register(app, auth, {"scoreTurns": _ScoreApi(reader, contexts, pool).score})


class _WrittenTurn(NamedTuple):
    """A turn: its JSON without the ids of its prompt, which begins with the first `shared` ones of `base`, and goes on with `rest`."""

    written: bytes
    base: str | None
    shared: int
    rest: bytes


class WrittenTurns:
    """Holds the turns of an answer; `base` of a turn is that of its record, because edited prompts have as much in common."""

    def __init__(self) -> None:
        self._turns: dict[str | None, _WrittenTurn] = {}

    def add(self, scored: ScoredTurn, base: str | None) -> None:
        """Add a turn."""
        prompt = ids.pack(scored.prompt_token_ids)
        shared = ids.common_head(self._prompt(base), prompt) if base in self._turns else 0
        written = msgspec.json.encode(msgspec.structs.replace(scored, prompt_token_ids=[]))
        self._turns[scored.turn] = _WrittenTurn(written, base, shared, ids.tail(prompt, shared))

    def __iter__(self) -> Iterator[bytes]:
        """Write each turn as JSON, in the order in which they were added."""
        for name, turn in self._turns.items():
            before, _, after = turn.written.partition(_PROMPT)
            yield b"".join([before, _PROMPT, ids.fragment(self._prompt(name)), after])

    @property
    def held(self) -> int:
        """Bytes that are held."""
        return sum(len(turn.written) + len(turn.rest) for turn in self._turns.values())

    def _prompt(self, name: str | None) -> bytes:
        parts: list[bytes] = []
        until: int | None = None
        while until != 0 and name in self._turns:
            turn = self._turns[name]
            parts.append(turn.rest if until is None else ids.head(turn.rest, max(0, until - turn.shared)))
            until = turn.shared if until is None else min(until, turn.shared)
            name = turn.base
        return b"".join(reversed(parts))


class _ScoreApi:
    def __init__(self, reader: SessionReader, contexts: EditedContexts, pool: Pool) -> None:
        self._reader = reader
        self._contexts = contexts
        self._pool = pool
        self._lock = asyncio.Lock()
        self._salt = secrets.token_hex(16)

    async def score(self, request: web.Request) -> web.StreamResponse:
        asked = await read_body(request, ScoreEdited, invalid=HTTPStatus.UNPROCESSABLE_ENTITY)
        session, version, found = await self._scores(request, asked)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the client may leave
            await response.write(b'{"session":%b,"version":%b,"turns":[' % (msgspec.json.encode(session), msgspec.json.encode(version)))
            for number, turn in enumerate(found):
                await response.write(b"," + turn if number else turn)
                await pause()
            await response.write_eof(b"]}")
        return response

    async def _scores(self, request: web.Request, asked: ScoreEdited) -> tuple[str, str, WrittenTurns]:
        """Return the session, the version and the turns of an `EditedScores`. The records are not held while they are sent."""
        async with self._lock:  # also for reading: a request that waits holds no records
            records = await self._reader.records(await self._reader.info(request), contexts=bool(asked.edits))
            turns = _chosen(records.turns, asked.turns)
            if not records.tokens.keys() >= {turn.id for turn in turns}:
                message = f"the records of session {records.info.id!r} are torn: the tokens of its turns are missing"
                raise HarnessError(message, status=HTTPStatus.CONFLICT, kind="torn_record")
            check_edits(asked.edits, [turn.messages for turn in turns])
            return records.info.id, *await self._scored(records, turns, asked)

    async def _scored(self, records: Records, turns: Sequence[Turn], asked: ScoreEdited) -> tuple[str, WrittenTurns]:
        """Return the version and the turns of an `EditedScores`."""
        engine_of = await self._engines(records.info.id, {turn.model for turn in turns})
        before = await _versions(engine_of.values()) if asked.score else {}
        contexts = await asyncio.to_thread(_contexts, records)
        sequence_of = {turn.id: line[0].id for line in lineages(records.turns) for turn in line}
        found = WrittenTurns()
        for turn in turns:
            recorded = _recorded(turn, sequence_of[turn.id], records.tokens[turn.id])
            scored = await self._turn(engine_of[turn.model], RecordedTurn(records.info, turn, contexts.get(turn.id)), recorded, asked)
            found.add(scored, turn.base)
        for engine, version in before.items():
            if (after := await _version(engine)) != version:
                message = (
                    f"the engine's weights changed from version {version!r} to {after!r} meanwhile: score again while they stay the same"
                )
                raise HarnessError(message, status=HTTPStatus.CONFLICT, kind="weights_changed")
        versions = {*before.values()}
        return versions.pop() if len(versions) == 1 else "", found

    async def _engines(self, session: str, models: Collection[str]) -> dict[str, Engine]:
        """Return the engine for each of some models. Raises `EngineError` if there is no engine, or no engine serves one of the models."""
        try:
            for model in models:
                await self._pool.check_model(model)
            return {model: self._pool.order(session, model)[0] for model in models}
        except HarnessError as why:
            raise EngineError(str(why)) from why

    async def _turn(self, engine: Engine, turn: RecordedTurn, recorded: ScoredTurn, asked: ScoreEdited) -> ScoredTurn:
        """Return a turn with its edited prompt, and its score.

        Raises:
            EngineError: the engine cannot answer now.
            StoreError: the store failed.
        """
        name = turn.turn.model
        model = await engine.model(name)
        if not model.capability.sampled(turn.turn, named=True):
            words = f"{EditRefusal.NOT_SCORED.meaning}: an adapter of another base model has the name now"
            return msgspec.structs.replace(recorded, refused=EditRefusal.NOT_SCORED, error=words)
        try:
            prompt, edits = await self._contexts.prompt(turn, asked.edits, model)
            edited = msgspec.structs.replace(recorded, prompt_token_ids=ids.unpack(prompt), edits=edits)
            if not asked.score:
                return edited
            scores = await self._score(engine, name, [*edited.prompt_token_ids, *edited.token_ids], asked.top)
        except EditRefusedError as why:
            return msgspec.structs.replace(recorded, refused=why.kind, error=str(why))
        except ScoringError as why:
            return msgspec.structs.replace(recorded, refused=EditRefusal.NOT_SCORED, error=f"{EditRefusal.NOT_SCORED.meaning}: {why}")
        start = len(edited.prompt_token_ids)
        top = {"top_ids": scores.top_ids[start:], "top_logprobs": scores.top_logprobs[start:]}
        return msgspec.structs.replace(edited, score=scores.logprobs[start:], **top)

    async def _score(self, engine: Engine, model: str, tokens: list[int], top: int) -> Scores:
        """Let the engine score a sequence.

        Raises:
            ScoringError: it is too long, or the engine refuses it.
            EngineError: the engine cannot answer now.
        """
        if len(tokens) > (most := default_tokens_at_once(top)):
            raise ScoringError(f"{len(tokens):,} tokens are more than {most:,}, the most at once with `top` {top}")
        try:
            async with asyncio.timeout(LONGEST_SCORING):
                answer = await engine.upstream.post("/v1/completions", scoring_request(tokens, model, top=top, salt=self._salt))
        except TimeoutError:
            raise EngineError("the engine did not score a turn in time", status=HTTPStatus.GATEWAY_TIMEOUT) from None
        if answer.status != OK:
            words = refusal_words(answer.status, answer.body)
            raise EngineError(words) if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else ScoringError(words)
        return await asyncio.to_thread(read_scores, answer.body, tokens, top=top)


def _chosen(turns: Sequence[Turn], named: Sequence[str]) -> list[Turn]:
    """Return the turns with these ids, or all, in the order in which they were recorded. Raises `HarnessError` if there is no such turn."""
    if unknown := sorted({*named} - {turn.id for turn in turns}):
        raise HarnessError(f"the session has no turn {unknown[0][:80]!r}", status=HTTPStatus.UNPROCESSABLE_ENTITY, param="turns")
    return [turn for turn in turns if not named or turn.id in named]


def _contexts(records: Records) -> Mapping[str, Context]:
    """Return the requests of all turns; none if a record is torn."""
    try:
        return whole_contexts(records.turns, records.contexts)
    except (KeyError, ValueError):
        return {}


def _recorded(turn: Turn, sequence: str, tokens: Tokens) -> ScoredTurn:
    """Write what was recorded of a turn."""
    mask, logprobs = training_values(turn, tokens)
    return ScoredTurn(turn=turn.id, sequence=sequence, token_ids=ids.unpack(tokens.completion), loss_mask=mask, logprobs=logprobs)


async def _versions(engines: Iterable[Engine]) -> dict[Engine, str]:
    """Return the label of each engine's weights."""
    return {engine: await _version(engine) for engine in dict.fromkeys(engines)}


async def _version(engine: Engine) -> str:
    """Return the engine's own label of its weights; `""` if it has none."""
    label = engine.driver.weight_label(await engine.upstream.get(engine.driver.weights_route)) or ""
    return "" if label in RESERVED else label

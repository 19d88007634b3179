"""The routes of the viewer's data; `tokencache.api.openapi` lists them with their paths.

All need the trainer's key, and each answer is bounded: to look never costs a live call more than milliseconds.
"""

import asyncio
from collections import OrderedDict
from typing import Any

from aiohttp import web

from tokencache.api.auth import Guard
from tokencache.api.openapi import register
from tokencache.api.reader import Reader, no_session
from tokencache.api.routes import answer
from tokencache.api.viewer.echoes import echoes
from tokencache.api.viewer.outline import outline
from tokencache.api.viewer.summaries import STATES, Summaries
from tokencache.api.viewer.texts import TokenTexts, Unread
from tokencache.api.viewer.window import Line, lay_out
from tokencache.core.lineage import lineages
from tokencache.core.turn import Turn
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.proxy.ledger import Ledger
from tokencache.store.base import SessionInfo
from tokencache.trajectories.formats.native import turn_object

MOST_TOKENS = 4096
"""Tokens that one answer may hold."""
MOST_SESSIONS = 500
_HELD_BYTES = 64 * 2**20
_AROUND = 4
"""Tokens either side of a window that are read with it: a character may reach across its edge."""


def browse_routes(app: web.Application, ledger: Ledger, engine: Pool, *, admin_key: str | None) -> None:
    """Add the routes to an application."""
    guard, browse = Guard(admin_key), _Browse(ledger, engine)
    handlers = {
        "listSummaries": browse.summaries,
        "getOutline": browse.outline,
        "getTurn": browse.turn,
        "getSequence": browse.sequence,
        "getTokens": browse.tokens,
        "getTexts": browse.texts,
    }
    register(app, guard, handlers)


class _Browse:
    def __init__(self, ledger: Ledger, engine: Pool) -> None:
        self._store = ledger.store
        self._ledger = ledger
        self._reader = Reader(ledger)
        self._summaries = Summaries(ledger)
        self._texts = TokenTexts(engine)
        self._held: OrderedDict[tuple[str, float, int, str], Line] = OrderedDict()

    async def summaries(self, request: web.Request) -> web.StreamResponse:
        state = request.query.get("state", "any")
        if state not in STATES:
            raise HarnessError(f"state {state[:80]!r} is not one of: {', '.join(STATES)}", param="state")
        offset, limit = _number(request, "offset", 0), _number(request, "limit", 100, most=MOST_SESSIONS)
        return answer(await self._summaries.page(contains=request.query.get("contains", ""), state=state, offset=offset, limit=limit))

    async def outline(self, request: web.Request) -> web.StreamResponse:
        info = await self._reader.info(request)
        turns = await self._store.turns(info.id)
        return answer(await asyncio.to_thread(outline, info, turns, self._ledger.owed(info.id)))

    async def turn(self, request: web.Request) -> web.StreamResponse:
        info, turns, turn = await self._turn(request, request.match_info["turn"])
        told: dict[str, Any] = {"session": info.id, "number": turns.index(turn), **turn_object(turn), "echoes": [], "torn": ""}
        try:
            contexts = await self._store.contexts(info.id, [one.id for one in turns])
            told["kept"] = bool(contexts[turn.id])
            told["echoes"] = await asyncio.to_thread(echoes, turn, turns, contexts)
        except (KeyError, ValueError) as why:
            told["torn"] = f"{type(why).__name__}: {why}"
        return answer(told)

    async def sequence(self, request: web.Request) -> web.StreamResponse:
        info, line = await self._line(request)
        return answer({
            "session": info.id,
            "id": line.turns[0].id,
            "model": line.turns[-1].model,
            "tokens": line.tokens,
            "turns": [turn.id for turn in line.turns],
            "runs": line.runs,
        })  # fmt: skip

    async def tokens(self, request: web.Request) -> web.StreamResponse:
        _, line = await self._line(request)
        start = min(_number(request, "start", 0), line.tokens)
        end = min(_number(request, "end", start + MOST_TOKENS), line.tokens)
        if not start <= end <= start + MOST_TOKENS:
            raise HarnessError(f"start and end must be a range of at most {MOST_TOKENS} tokens", param="end")
        first = max(start - _AROUND, 0)
        texts, unread = await self._read(line.turns[-1].model, line.ids(first, min(end + _AROUND, line.tokens)))
        return answer({
            "start": start,
            "end": end,
            "ids": line.ids(start, end),
            "logprobs": line.values(start, end),
            "texts": texts[start - first : end - first] if texts is not None else None,
            "unread": unread,
        })  # fmt: skip

    async def texts(self, request: web.Request) -> web.StreamResponse:
        _, _, turn = await self._turn(request, request.query.get("turn", ""))
        try:
            wanted = [int(one) for one in request.query.get("ids", "").split(",") if one]
        except ValueError:
            raise HarnessError("ids must be numbers with commas between them", param="ids") from None
        if len(wanted) > MOST_TOKENS or any(not 0 <= one < 2**31 for one in wanted):
            raise HarnessError(f"ids must be at most {MOST_TOKENS} token ids", param="ids")
        texts, unread = await self._read(turn.model, wanted)
        return answer({"ids": wanted, "texts": texts, "unread": unread})

    async def _read(self, model: str, tokens: list[int]) -> tuple[list[str | None] | None, str]:
        try:
            return await self._texts.read(model, tokens), ""
        except Unread as why:
            return None, str(why)

    async def _turn(self, request: web.Request, name: str) -> tuple[SessionInfo, list[Turn], Turn]:
        info = await self._reader.info(request)
        turns = await self._store.turns(info.id)
        found = next((turn for turn in turns if turn.id == name), None)
        if found is None:
            raise HarnessError(f"session {info.id!r} has no turn {name[:80]!r}", status=404, kind="not_found_error")
        return info, turns, found

    async def _line(self, request: web.Request) -> tuple[SessionInfo, Line]:
        """The sequence that a path names, laid out; one that somebody just looked at is at hand."""
        info, name = await self._reader.info(request), request.match_info["sequence"]
        key = (info.id, info.created, info.turns, name)
        known = self._held.get(key)
        if known is None:
            known = await self._laid_out(info, name)
            self._held[key] = known
            while len(self._held) > 1 and sum(map(_weight, self._held.values())) > _HELD_BYTES:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        return info, known

    async def _laid_out(self, info: SessionInfo, name: str) -> Line:
        turns = await self._store.turns(info.id)
        line = next((line for line in lineages(turns) if line[0].id == name), None)
        if line is None:
            raise HarnessError(f"session {info.id!r} has no sequence {name[:80]!r}", status=404, kind="not_found_error")
        try:
            prefix = await self._store.prefix(info.id, line[-1].id)
            tokens = await self._store.tokens(info.id, [turn.id for turn in line])
            return await asyncio.to_thread(lay_out, line, prefix.ids, tokens, {turn.id: turn for turn in turns})
        except KeyError:
            raise no_session(info.id) from None  # deleted just now
        except ValueError as why:
            raise HarnessError(f"the records of this sequence are torn: {why}", status=409, kind="torn_record") from why


def _weight(line: Line) -> int:
    return len(line.packed) + sum(map(len, line.logprobs.values()))


def _number(request: web.Request, name: str, default: int, *, most: int = 2**31) -> int:
    """A number of the query.

    Raises:
        HarnessError: it is none, or out of bounds.
    """
    given = request.query.get(name, "")
    if not given:
        return default
    if not given.isascii() or not given.isdigit() or not int(given[:12]) <= most:
        raise HarnessError(f"{name} must be a number from 0 to {most}", param=name)
    return int(given)

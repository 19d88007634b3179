"""Serves the page of the viewer and its data.

The page is public, because it contains no data. The routes of the data need the trainer's key; `tokencache.api.openapi` lists them. Every
response is bounded, so that viewing delays calls by a few milliseconds at most.
"""

import asyncio
import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from tokencache.api.auth import AdminAuth
from tokencache.api.gauges import Gauges
from tokencache.api.http import choice, json_response, not_found, number
from tokencache.api.lost_text import LostTextMeter
from tokencache.api.openapi import register
from tokencache.api.reader import SessionReader, no_session
from tokencache.api.summaries import Filter, SessionList
from tokencache.api.viewer.comparison import compare_parts, compare_replies
from tokencache.api.viewer.groups import GroupComparison
from tokencache.api.viewer.sessions import outline
from tokencache.api.viewer.tokens import SequenceLayout, TextsUnavailable, TokenTexts, lay_out
from tokencache.api.viewer.transcript import MAX_MESSAGES, Transcript, message_objects, needed_contexts, transcribe
from tokencache.core.context import whole_contexts
from tokencache.core.incidents import IncidentKind
from tokencache.core.lineage import ancestries, lineages
from tokencache.core.lost_text import LostText
from tokencache.core.reasons import Reason
from tokencache.core.session import Reward
from tokencache.core.turn import Turn
from tokencache.engine.announced_weights import AnnouncedWeights
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.proxy.ledger import Ledger
from tokencache.recent import Recent, RecentBySize
from tokencache.store.base import SessionInfo
from tokencache.trajectories.changes import Comparisons
from tokencache.trajectories.formats.native import turn_object
from tokencache.trajectories.formats.registry import FORMATS
from tokencache.trajectories.links import Line, links
from tokencache.trajectories.summaries import SESSION_STATES, SORTS
from tokencache.trajectories.values import TurnChange

UI = "/tokencache/ui/"
MAX_TOKENS = 4096
"""Tokens in one response."""
MAX_SESSIONS = 500
_LOST_TEXT_TIMEOUT = 10.0
"""Seconds for measuring the lost text of a session."""
_TEMPORARY = frozenset({"engine-away", "time-limit"})
"""Why lost text is not known now, and may be later."""
_CACHED_BYTES = 64 * 2**20
_CACHED_TRANSCRIPTS = 4
_OVERLAP = 4
"""Tokens on either side of a window that are decoded with it, because a character may cross its border."""

_CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_viewer_routes(  # noqa: PLR0917 - the parts of the proxy that it shows
    app: web.Application, auth: AdminAuth, ledger: Ledger, pool: Pool, weights: AnnouncedWeights, listing: SessionList, gauges: Gauges
) -> None:
    """Add the viewer to an application: its page and its data."""
    api = _ViewerApi(ledger, pool, weights, listing, gauges)
    handlers = {
        "listSummaries": api.summaries,
        "compareGroup": api.group,
        "getOutline": api.outline,
        "listChanges": api.changes,
        "getTurn": api.turn,
        "getSequence": api.sequence,
        "getTokens": api.tokens,
        "getMessages": api.messages,
        "getTexts": api.texts,
    }
    register(app, auth, handlers)
    app.router.add_get(UI.rstrip("/"), _redirect)
    app.router.add_get(UI + "meanings.js", _file(meanings_script(), _CONTENT_TYPES[".js"]))
    for name, body in _static_files():
        handler = _file(body, _CONTENT_TYPES[PurePath(name).suffix])
        app.router.add_get(UI + name, handler)
        if name == "index.html":
            app.router.add_get(UI, handler)


@functools.cache
def _static_files() -> list[tuple[str, bytes]]:
    """Read the files of the page: names and contents."""
    return sorted((path.name, path.read_bytes()) for path in files(__package__).joinpath("static").iterdir())


@functools.cache
def meanings_script() -> bytes:
    """Write a JavaScript module for the page: the meanings of reasons and incident kinds, and the names of formats and filters."""
    reasons = {str(reason): _without_markdown(reason.meaning) for reason in Reason}
    incidents = {str(kind): _without_markdown(f"{kind.meaning}. {kind.action}") for kind in IncidentKind}
    tables: dict[str, Any] = {
        "REASONS": reasons,
        "INCIDENTS": incidents,
        "FORMATS": list(FORMATS),
        "FILTERS": [name for name in Filter._fields if name != "contains"],
    }
    return "".join(f"export const {name} = {msgspec.json.encode(table).decode()};\n" for name, table in tables.items()).encode()


def _without_markdown(text: str) -> str:
    """Remove links in parentheses, parentheses at the beginning (which name matches), and backticks. Other links become plain text."""
    text = re.sub(r" \(\[[^]]*\]\([^)]*\)\)|^\([^)]*\) ", "", text)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


async def _redirect(_request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("ui/")  # relative, because another proxy may add a path prefix


def _file(body: bytes, content_type: str) -> Handler:
    async def serve(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)

    return serve


class _ViewerApi:
    def __init__(self, ledger: Ledger, pool: Pool, weights: AnnouncedWeights, listing: SessionList, gauges: Gauges) -> None:
        self._store = ledger.store
        self._ledger = ledger
        self._reader = SessionReader(ledger, weights)
        self._list, self._gauges = listing, gauges
        self._texts, self._lost = TokenTexts(pool), LostTextMeter(pool, timeout=_LOST_TEXT_TIMEOUT)
        self._groups = GroupComparison(ledger.store, self._texts)
        self._layouts: RecentBySize[tuple[str, float, int, str], SequenceLayout] = RecentBySize(_CACHED_BYTES, SequenceLayout.size)
        self._changes: Recent[tuple[str, float, int], dict[str, Any]] = Recent(_CACHED_TRANSCRIPTS)
        self._transcripts: Recent[tuple[str, float, str], Transcript] = Recent(_CACHED_TRANSCRIPTS)

    async def summaries(self, request: web.Request) -> web.StreamResponse:
        state = choice(request, "state", SESSION_STATES, "any")
        offset, limit = number(request, "offset", 0), number(request, "limit", 100, most=MAX_SESSIONS)
        sort = choice(request, "sort", [way + name for name in SORTS for way in ("", "-")], "-used")
        wanted = Filter(**{name: request.query.get(name, "") for name in Filter._fields})
        return json_response(await self._list.page(wanted, state=state, sort=sort, offset=offset, limit=limit))

    async def group(self, request: web.Request) -> web.StreamResponse:
        name = request.query.get("group", "")
        summaries = await self._list.group(name) if name else []
        if not summaries:
            raise not_found(f"no session is in group {name[:80]!r}")
        state = (await self._gauges.groups()).get(name)
        waits = str(state) if state is not None and state.waits else ""
        return json_response({"group": name, "waits": waits, **await self._groups.compare(summaries)})

    async def outline(self, request: web.Request) -> web.StreamResponse:
        info = await self._reader.info(request)
        turns = await self._store.turns(info.id)
        return json_response(await asyncio.to_thread(outline, info, turns, self._ledger.unsaved(info.id), self._reader.announced))

    async def changes(self, request: web.Request) -> web.StreamResponse:
        info = await self._reader.info(request)
        key = (info.id, info.created, info.turns)
        found = self._changes.get(key)
        if found is None:
            turns = await self._store.turns(info.id)
            with _reading(info.id):
                contexts = await self._store.contexts(info.id, [turn.id for turn in turns])
                found = await asyncio.to_thread(_changes_and_links, turns, contexts)
            lost = await self._lost_text(info, turns)
            found["changes"] = [_with_lost_text(change, lost[change.turn]) for change in found["changes"]]
            if _TEMPORARY.isdisjoint(one.unknown for one in lost.values()):
                self._changes[key] = found
        return json_response({"session": info.id, **found})

    async def _lost_text(self, info: SessionInfo, turns: Sequence[Turn]) -> dict[str, LostText]:
        with _reading(info.id):
            tokens = await self._store.tokens(info.id, [turn.id for turn in turns]) if turns else {}
        return await self._lost.measure(turns, tokens)

    async def turn(self, request: web.Request) -> web.StreamResponse:
        info, turns, turn = await self._turn(request, request.match_info["turn"])
        written = turn_object(turn, info.reward or Reward())
        body: dict[str, Any] = {"session": info.id, "number": turns.index(turn), **written, "echoes": [], "torn": ""}
        try:
            contexts = await self._store.contexts(info.id, [one.id for one in turns])
            body["kept"] = bool(contexts[turn.id])
            body["echoes"] = await asyncio.to_thread(compare_replies, turn, turns, contexts)
            body["change"] = await asyncio.to_thread(_change, body["number"], turns, contexts)
        except (KeyError, ValueError) as error:
            body["torn"] = f"{type(error).__name__}: {error}"
        body["lost"] = (await self._lost_text(info, [turn]))[turn.id]
        return json_response(body)

    async def sequence(self, request: web.Request) -> web.StreamResponse:
        info, layout = await self._layout(request)
        return json_response({
            "session": info.id,
            "id": layout.turns[0].id,
            "model": layout.turns[-1].model,
            "tokens": layout.tokens,
            "turns": [turn.id for turn in layout.turns],
            "runs": layout.runs,
            "media": layout.turns[-1].media,
        })  # fmt: skip

    async def tokens(self, request: web.Request) -> web.StreamResponse:
        _, layout = await self._layout(request)
        start = min(number(request, "start", 0), layout.tokens)
        end = min(number(request, "end", start + MAX_TOKENS), layout.tokens)
        if not start <= end <= start + MAX_TOKENS:
            raise HarnessError(f"start and end must be a range of at most {MAX_TOKENS} tokens", param="end")
        first = max(start - _OVERLAP, 0)
        texts, unread = await self._decode(layout.turns[-1].model, layout.ids(first, min(end + _OVERLAP, layout.tokens)))
        return json_response({
            "start": start,
            "end": end,
            "ids": layout.ids(start, end),
            "logprobs": layout.logprobs(start, end),
            "texts": texts[start - first : end - first] if texts is not None else None,
            "unread": unread,
        })  # fmt: skip

    async def messages(self, request: web.Request) -> web.StreamResponse:
        info, layout = await self._layout(request)
        found = await self._transcript(info, layout)
        total = len(found.places)
        start = min(number(request, "start", 0), total)
        end = min(number(request, "end", start + MAX_MESSAGES), total)
        if not start <= end <= start + MAX_MESSAGES:
            raise HarnessError(f"start and end must be a range of at most {MAX_MESSAGES} messages", param="end")
        return json_response({
            "messages": total,
            "kept": found.kept,
            "starts": [place.tokens[0] for place in found.places],
            "start": start,
            "end": end,
            "window": message_objects(found.places[start:end]),
        })  # fmt: skip

    async def texts(self, request: web.Request) -> web.StreamResponse:
        _, _, turn = await self._turn(request, request.query.get("turn", ""))
        try:
            wanted = [int(one) for one in request.query.get("ids", "").split(",") if one]
        except ValueError:
            raise HarnessError("ids must be numbers with commas between them", param="ids") from None
        if len(wanted) > MAX_TOKENS or any(not 0 <= one < 2**31 for one in wanted):
            raise HarnessError(f"ids must be at most {MAX_TOKENS} token ids", param="ids")
        texts, unread = await self._decode(turn.model, wanted)
        return json_response({"ids": wanted, "texts": texts, "unread": unread})

    async def _decode(self, model: str, tokens: list[int]) -> tuple[list[str | None] | None, str]:
        try:
            return await self._texts.decode(model, tokens), ""
        except TextsUnavailable as error:
            return None, str(error)

    async def _turn(self, request: web.Request, name: str) -> tuple[SessionInfo, list[Turn], Turn]:
        info = await self._reader.info(request)
        turns = await self._store.turns(info.id)
        found = next((turn for turn in turns if turn.id == name), None)
        if found is None:
            raise not_found(f"session {info.id!r} has no turn {name[:80]!r}")
        return info, turns, found

    async def _layout(self, request: web.Request) -> tuple[SessionInfo, SequenceLayout]:
        """Lay out the sequence that a path names. Recent layouts are cached, because a page asks for many windows of one sequence."""
        info, name = await self._reader.info(request), request.match_info["sequence"]
        key = (info.id, info.created, info.turns, name)
        layout = self._layouts.get(key)
        if layout is None:
            layout = await self._laid_out(info, name)
            self._layouts[key] = layout
        return info, layout

    async def _transcript(self, info: SessionInfo, layout: SequenceLayout) -> Transcript:
        """Write the transcript of a sequence. Recent ones are cached, because a page asks for many windows of one conversation."""
        last = layout.turns[-1]
        key = (info.id, info.created, last.id)
        transcript = self._transcripts.get(key)
        if transcript is None:
            turns = {turn.id: turn for turn in await self._store.turns(info.id)}
            with _reading(info.id):
                contexts = await self._store.contexts(info.id, needed_contexts(last, turns))
                transcript = await asyncio.to_thread(transcribe, last, turns, contexts, layout.runs)
            self._transcripts[key] = transcript
        return transcript

    async def _laid_out(self, info: SessionInfo, name: str) -> SequenceLayout:
        turns = await self._store.turns(info.id)
        line = next((line for line in lineages(turns) if line[0].id == name), None)
        if line is None:
            raise not_found(f"session {info.id!r} has no sequence {name[:80]!r}")
        with _reading(info.id):
            prefix = await self._store.prefix(info.id, line[-1].id)
            tokens = await self._store.tokens(info.id, [turn.id for turn in line])
            return await asyncio.to_thread(lay_out, line, prefix.ids, tokens, {turn.id: turn for turn in turns})


def _changes_and_links(turns: Sequence[Turn], packed: Mapping[str, bytes]) -> dict[str, Any]:
    contexts, lines = whole_contexts(turns, packed), lineages(turns)
    rooted = [Line(root, line) for line, (_, root) in zip(lines, ancestries(lines), strict=True)]
    return {"changes": Comparisons(turns, contexts).all(), "links": links(rooted, contexts)}


def _with_lost_text(change: TurnChange, lost: LostText) -> TurnChange:
    return msgspec.structs.replace(change, lost=list(lost.texts), not_compared=lost.unknown)


def _change(number: int, turns: Sequence[Turn], packed: Mapping[str, bytes]) -> dict[str, Any]:
    """Say what changed in the request of a turn, with both forms of the first message that differs."""
    compared = Comparisons(turns, whole_contexts(turns, packed))
    change = compared.all()[number]
    before, after = compared.changed_message(change)
    return {**msgspec.structs.asdict(change), "parts": compare_parts(before, after) if after is not None else ()}


@contextlib.contextmanager
def _reading(session: str) -> Iterator[None]:
    """Read the records of a session. Raises `HarnessError` if the session was deleted meanwhile (404), or its records are torn (409)."""
    try:
        yield
    except KeyError:
        raise no_session(session) from None
    except ValueError as error:
        raise HarnessError(f"the records of this sequence are torn: {error}", status=409, kind="torn_record") from error

"""Continues a reply that an engine broke off, from its last sampled token.

An engine may end a reply before the model does: `/pause?mode=abort` and `/abort_requests` (vLLM), an error in its stream, or the end of its
process. Sampling such a reply anew throws tokens away, and favours short replies, because long ones are hit more often. So the prompt and
all tokens sampled so far are sent as the next exact prompt, to any engine that serves the session, as often as needed. The reply is
recorded as one turn, whose *pieces* are the parts that one request sampled (`core.turn.ReplyPiece`). A prompt with images goes on with the
same images in the same places.

Only the ids of a continuation are the engine's own. Its text is not: parsers begin anew, and take the rest of a thought or of a tool call
for text (vLLM 0.32). So all text after a cut is made by derender from the ids of the whole reply, and the client gets the difference to
what it has received.

A request is continued only if each of its members is known to leave the distribution of the next token as it is (`dialects.members`,
measured on vLLM 0.32). Penalties of the output, stop strings, words that must not appear and grammars begin anew with a request.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from tokencache.core import ids
from tokencache.core.media import Places, PlacesDifferError, place_media
from tokencache.core.turn import ReplyPiece
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.json_io import FIELDS, member, value_of
from tokencache.dialects.members import HARMLESS, LIMITS, SURVIVING
from tokencache.dialects.sse import DONE, EventSplitter, data_of
from tokencache.engine.connections import Answer
from tokencache.engine.derender import Derender, DerenderRequest
from tokencache.engine.drivers.base import ExactPrompt, LastReply
from tokencache.engine.figures import judge, wrong_prompt
from tokencache.engine.probe import Capability
from tokencache.engine.reply import Choice, Reply
from tokencache.engine.thinking import MARKS
from tokencache.proxy.facts import EndedPiece, PlannedCall

Raw = msgspec.Raw

NO_EXACT_IMAGES = "replies to requests with images are continued only with the plugin for images (docs/images.md)"
MOST_PIECES = 8
"""Maximum number of pieces of one reply."""
WORDS_SECONDS = 1.0
"""Seconds between two requests for the words of a continuation; each costs more the longer the reply is."""

AbortedPolicy = Literal["continue", "again", "pass"]
"""What happens to a reply that an engine broke off: it is continued, sampled anew if the client received nothing of it, or passed on."""


def reason_against(fields: Mapping[str, Raw]) -> str:
    """Return why a request (its raw members) cannot be continued after a cut: the member that does not survive it; `""` if all do."""
    if "messages" not in fields:
        return "text completions are not continued"
    for name, raw in fields.items():
        if name in SURVIVING:
            continue
        harmless = HARMLESS.get(name)
        if harmless is None:
            return f"{name} is not known to survive a cut"
        if value_of(raw) not in harmless:
            return f"{name} does not survive a cut"
    if not _given(fields, "stream") and _given(fields, "stream_options"):
        return "stream_options without stream is for the engine to refuse"
    if any(isinstance(tool, dict) and _is_strict(tool) for tool in value_of(fields.get("tools", Raw(b"[]"))) or ()):
        return "a strict tool does not survive a cut"
    return ""


def _given(fields: Mapping[str, Raw], name: str) -> bool:
    return bytes(fields.get(name, b"null")) not in {b"null", b"false"}


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and bool(function.get("strict"))


def remaining_fields(fields: Mapping[str, Raw], sampled: int, piece: int, own_limit: int = 0) -> dict[str, Raw]:
    """Return the members for the next piece of a reply: limits without what was sampled, another seed, as a stream.

    Args:
        fields: the members of the whole request.
        sampled: number of tokens that were sampled so far.
        piece: number of pieces so far. The noise of a request with a seed begins anew, so with the same seed a reply repeats its own
            beginning.
        own_limit: the engine's own limit for a request without one; 0 if there is none.
    """
    changed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    changed |= {name: limit - sampled for name, limit in limits_of(fields).items()}
    if own_limit:
        changed["max_tokens"] = own_limit - sampled
    if isinstance(least := value_of(fields.get("min_tokens", Raw(b"null"))), int):
        changed["min_tokens"] = max(0, least - sampled)
    if isinstance(seed := value_of(fields.get("seed", Raw(b"null"))), int):
        changed["seed"] = int.from_bytes(hashlib.blake2b(b"%d %d" % (seed, piece), digest_size=4).digest(), "big")
    return {**fields, **{name: Raw(msgspec.json.encode(value)) for name, value in changed.items()}}


def limits_of(fields: Mapping[str, Raw]) -> dict[str, int]:
    """Return the limits for the reply in a request's members, in tokens."""
    found = {name: value_of(fields[name]) for name in LIMITS if name in fields}
    return {name: limit for name, limit in found.items() if isinstance(limit, int)}


_HEAD = ("id", "object", "created", "model")


class _PieceLogprobs(msgspec.Struct):
    content: list[Raw] | None = None


class _PieceChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _PieceLogprobs | None = None


class _PieceChunk(msgspec.Struct):
    choices: list[_PieceChoice] = []


class _Sampled(NamedTuple):
    """Ids that wait for their words, and their log probabilities (raw entries)."""

    ids: list[int]
    logprobs: list[Raw]


class ContinuationError(Exception):
    """A reply cannot be continued. The message is the reason."""


class Continuation:
    """A reply in pieces.

    Attributes:
        differs: whether the client received other words than those of the reply's tokens.
        broke: how the last piece that `chunks` read was broken off (`ReplyPiece.ended`); `""` if it was not.
    """

    def __init__(self, call: ChatCall, reply: Reply, derender: Derender, first: bytes, pieces: list[EndedPiece]) -> None:
        """Begin when the first piece has ended.

        Args:
            call: the request.
            reply: what was sampled so far.
            derender: makes the words.
            first: the first chunk of the stream (JSON).
            pieces: receives the pieces that have ended.
        """
        self._call, self._reply, self._derender, self._pieces = call, reply, derender, pieces
        self._head = {name: value for name, value in FIELDS.decode(first or b"{}").items() if name in _HEAD}
        self._own_limit: int | None = None
        self.differs = False
        self.broke = ""

    @property
    def sampled(self) -> Sequence[int]:
        """The ids that were sampled so far."""
        return self._reply.choices[0].ids

    def end_piece(self, planned: PlannedCall, request: str, ended: str) -> None:
        """Note that a piece has ended.

        Args:
            planned: its engine, and the readings of its policy version, which have ended too.
            request: the id of its request.
            ended: how it ended (`ReplyPiece.ended`).
        """
        start, end = self._pieces[-1].piece.end if self._pieces else 0, len(self.sampled)
        versions = planned.weights.versions(self._reply.versions(0), end - start)
        self._pieces.append(EndedPiece(ReplyPiece(request, planned.engine.upstream.url, start, end, ended), versions))

    def check(self) -> None:
        """Check that the reply can go on.

        Raises:
            ContinuationError: it cannot.
        """
        choice = self._reply.choices.get(0)
        if choice is None or not choice.ids or not self._reply.prompt.known:
            raise ContinuationError("no token had arrived")
        if why := wrong_prompt(self._reply):
            raise ContinuationError(why)
        finding = judge(self._reply)[0]
        if finding.hole is not None:
            raise ContinuationError(f"not all of its ids are certain: {finding.detail or finding.hole}")
        if finding.no_logprobs:
            raise ContinuationError("the engine returned no log probabilities")
        if len(self._pieces) >= MOST_PIECES:
            raise ContinuationError(f"it was broken off {MOST_PIECES} times")

    async def find_own_limit(self, request: DerenderRequest, max_model_len: int) -> None:
        """Ask an engine once for its own limit, which applies to a request without one.

        Raises:
            EngineError: it does not report the limit.
        """
        if self._own_limit is None:
            given = limits_of(self._call.fields)
            self._own_limit = 0 if given else await self._derender.default_limit(request, max_model_len)

    def has_room(self, max_model_len: int) -> bool:
        """Whether the request's limits and the context (0: unknown) allow more tokens."""
        limits = [*limits_of(self._call.fields).values()]
        if max_model_len:
            limits.append(max_model_len - self._reply.prompt.tokens)
        return all(len(self.sampled) < limit for limit in limits)

    @property
    def prompt(self) -> tuple[bytes, ids.Fragment]:
        """The exact prompt of the next piece: packed ids, and as a JSON fragment."""
        prompt, sampled = self._reply.prompt, ids.pack(self.sampled)
        assert prompt.packed is not None  # noqa: S101 - `check` looked
        return prompt.packed + sampled, prompt.fragment.extended(sampled)

    def exact(self, capability: Capability) -> ExactPrompt:
        """Make the exact prompt of the next piece for an engine.

        Raises:
            ContinuationError: the engine takes none with these images, or the last one did not report their places.
        """
        packed, fragment = self.prompt
        prompt = ExactPrompt(packed, fragment, LastReply(-1, 0, 0))
        parts = self._call.media_parts()
        if not parts:
            return prompt
        if capability.images != "plugin":
            raise ContinuationError(NO_EXACT_IMAGES)
        try:
            media = place_media(parts, self._reply.places or {}, self._reply.prompt.tokens)
        except PlacesDifferError as why:
            raise ContinuationError(str(why)) from why
        inside = {place for medium in media for place in range(medium.start, medium.end)}
        sampled = [place for place in ids.places_of(packed, capability.placeholder_ids) if place not in inside]
        return msgspec.structs.replace(prompt, media=media, sampled=tuple(sampled))

    def check_places(self, places: Places | None) -> None:
        """Check the places of the images that an engine reports for the next piece.

        Raises:
            ContinuationError: they are others than before.
        """
        if self._call.media and places != self._reply.places:
            raise ContinuationError("the engine reports other places of the images")

    @property
    def call(self) -> ChatCall:
        """The request for the next piece."""
        fields = remaining_fields(self._call.fields, len(self.sampled), len(self._pieces), self._own_limit or 0)
        return msgspec.structs.replace(self._call, fields=fields, stream=True)

    async def chunks(self, answer: Answer | None, request: DerenderRequest) -> AsyncGenerator[bytes, None]:
        """Read the next piece; yields the chunks (JSON) of the continued stream, as vLLM would have written it.

        Without an answer, the reply ends here, because its limit is reached. The reply is not finished afterwards if this piece was broken
        off too. Tokens that arrived are in the reply even if the caller stops here, or if their words cannot be made.

        Raises:
            EngineError: derender did not answer.
            ContinuationError: the engine used another prompt.
        """
        words = _Words(self._derender, request, self._reply)
        piece, waiting, start = Reply(), _Sampled([], []), len(self.sampled)
        piece.vocabulary, piece.must_count = self._reply.vocabulary, self._reply.must_count
        try:
            if answer is not None:
                async for chunk in self._middle_chunks(words, piece, answer, waiting):
                    yield chunk
            ended = piece.choices.get(0) if answer is not None else _at_limit()
            self.broke = "" if answer is None else _how_broken(piece)
            if ended is not None and ended.finish_reason not in {None, "abort"}:
                for chunk in await self._last_chunks(words, ended, waiting):
                    yield chunk
            elif waiting.ids:
                yield self._chunk(await words.add(waiting.ids), waiting)
        finally:
            if waiting.ids:  # without their words: nothing that was sampled is lost
                self._reply.add(self._chunk({}, waiting))
            finding = judge(piece, whole=piece.finished and not piece.aborted).get(0)
            if finding is not None and finding.hole is not None:
                self._reply.choices[0].doubt_after(start + finding.tokens, finding.detail or finding.hole)
            self._reply.choices[0].versions = piece.versions(0) if piece.choices else []
            self.differs = words.differs

    async def chunks_without_words(self, answer: Answer | None) -> AsyncGenerator[bytes, None]:
        """Read the next piece; yields its chunks (JSON) as the engine writes them. Without an answer, the reply ends here.

        Raises:
            ContinuationError: the engine used another prompt.
        """
        if answer is None:
            yield self._chunk({}, _Sampled([], []), finish_reason="length", stop_reason=None)
            return
        packed, fragment = self.prompt
        echo = Reply()
        echo.prompt.sent = fragment
        async for data in events_of(answer):
            if not echo.prompt.known:
                echo.add(data)
            _check_prompt(echo, packed)
            yield data

    async def _middle_chunks(self, words: "_Words", piece: Reply, answer: Answer, waiting: _Sampled) -> AsyncIterator[bytes]:
        """Read a piece to its end; yields chunks with the words so far."""
        packed, piece.prompt.sent = self.prompt
        loop = asyncio.get_running_loop()
        due = loop.time() + WORDS_SECONDS
        async for data in events_of(answer):
            self._take(piece, data, packed, waiting)
            if piece.error:
                return  # a finished piece is read to its end: its usage follows
            if waiting.ids and not piece.finished and loop.time() >= due:  # the last id may end the message: it has no words
                yield self._chunk(await words.add(waiting.ids), waiting)
                due = loop.time() + WORDS_SECONDS

    @staticmethod
    def _take(piece: Reply, data: bytes, packed: bytes, waiting: _Sampled) -> None:
        data = piece.without_experts(data)
        brief = piece.add(data)
        if piece.unreadable:
            raise ContinuationError("the engine sent an event that cannot be read")
        _check_prompt(piece, packed)  # before anything is taken: what was sampled after another prompt does not belong to the reply
        for choice in msgspec.json.decode(brief, type=_PieceChunk).choices:
            waiting.ids.extend(choice.token_ids or ())
            waiting.logprobs.extend((choice.logprobs.content or ()) if choice.logprobs is not None else ())

    async def _last_chunks(self, words: "_Words", choice: Choice, waiting: _Sampled) -> list[bytes]:
        """Make the chunks with the last words and the finish reason, and with the usage if it was requested."""
        ended_by_id, sampled = choice.finish_reason == "stop" and bool(waiting.ids), len(self.sampled) + len(waiting.ids)
        delta = await words.add(waiting.ids[:-1] if ended_by_id else waiting.ids, choice.finish_reason)
        finish = {"finish_reason": words.finish_reason or choice.finish_reason, "stop_reason": choice.stop_reason}
        chunks = [self._chunk(delta, waiting)] if delta or waiting.ids else []
        chunks.append(self._chunk({}, _Sampled([], []), **finish))
        if member(self._call.fields, "stream_options", (dict,), {}).get("include_usage"):
            chunks.append(self._usage(sampled))
        return [*chunks, DONE]

    def _usage(self, sampled: int) -> bytes:
        prompt = self._reply.prompt.tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        return msgspec.json.encode({**self._head, "choices": [], "usage": usage})

    def _chunk(self, delta: Mapping[str, Any], sampled: _Sampled, **finish: Any) -> bytes:
        """Write a chunk, and empty `sampled`."""
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": {"content": list(sampled.logprobs)} if sampled.ids else None,
            "finish_reason": None,
            "token_ids": list(sampled.ids),
            **finish,
        }
        sampled.ids.clear()
        sampled.logprobs.clear()
        return msgspec.json.encode({**self._head, "choices": [choice]})


def _how_broken(piece: Reply) -> str:
    if piece.aborted:
        return "abort"
    return "" if piece.finished else "error" if piece.error else "lost"


def _check_prompt(piece: Reply, packed: bytes) -> None:
    if piece.prompt.known and not piece.prompt.agreed and piece.prompt.packed != packed:
        raise ContinuationError("the engine used other ids than were sent")


def _at_limit() -> Choice:
    ended = Choice()
    ended.finish_reason = "length"
    return ended


class _Words:
    """Makes the words of a continued reply, and compares them with what the client has received."""

    def __init__(self, derender: Derender, request: DerenderRequest, reply: Reply) -> None:
        self._derender, self._request, self._reply = derender, request, reply
        self._made = Choice()
        self._state = Raw(b"null")
        self._unread = list(reply.choices[0].ids)
        self.finish_reason: str | None = None

    @property
    def differs(self) -> bool:
        """Whether the client has received words that are not those of the tokens."""
        return self.finish_reason is not None and _difference(self._reply.choices[0], self._made) is None

    async def add(self, sampled: Sequence[int], finish_reason: str | None = None) -> dict[str, Any]:
        """Add ids; returns the delta that the client has not received yet.

        Raises:
            EngineError: derender did not answer.
        """
        new, self._unread = [*self._unread, *sampled], []
        delta, finish, self._state = await self._derender.delta(self._request, self._state, new, finish_reason)
        self._made.add_messages([delta], [(0, 0)])
        self.finish_reason = finish
        return _difference(self._reply.choices[0], self._made) or {}


def _difference(received: Choice, made: Choice) -> dict[str, Any] | None:
    """Return the delta between what a client has received and a message; `None` if it has received something else.

    The message may still be shorter: parsers hold back what may be the beginning of a tag.
    """
    delta: dict[str, Any] = {}
    for name in ("reasoning", "content"):
        had, has = "".join(getattr(received, name)), "".join(getattr(made, name))
        if name == "reasoning":
            had, has = _without_mark(had), _without_mark(has)
        if not (has.startswith(had) or had.startswith(has)):
            return None
        if len(has) > len(had):
            delta[name] = has[len(had) :]
    calls = []
    for index in sorted(made.calls):
        call = made.calls[index].whole()
        if index not in received.calls:
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"index": index, "id": call.id, "type": "function", "function": function})
            continue
        known = received.calls[index].whole()
        if known.name != call.name or not (call.arguments.startswith(known.arguments) or known.arguments.startswith(call.arguments)):
            return None
        if len(call.arguments) > len(known.arguments):
            calls.append({"index": index, "function": {"arguments": call.arguments[len(known.arguments) :]}})
    return {**delta, "tool_calls": calls} if calls else delta


def _without_mark(words: str) -> str:
    """Leave out the mark that begins a thought: some of vLLM's parsers leave it there if it arrives with other tokens (0.32)."""
    return words.removeprefix(next((mark for mark, _ in MARKS if words.startswith(mark)), ""))


async def events_of(answer: Answer) -> AsyncIterator[bytes]:
    """Read the data of a stream's events up to its end, however it ends: a lost connection is an end without a finish reason."""
    splitter, ended = EventSplitter(), False
    try:
        async for part in answer.content.iter_any():
            for event in splitter.feed(part):
                data = data_of(event)
                ended = ended or data == DONE  # what follows is not part of the reply
                if data is not None and not ended:
                    yield data
    except (aiohttp.ClientError, ConnectionResetError, TimeoutError):
        return

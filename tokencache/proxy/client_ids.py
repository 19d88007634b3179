"""Client ids: token ids that a client sends back with a history, as evidence, and as the beginning of a prompt where they are proven.

Agents of NeMo Gym send `prompt_token_ids` and `generation_token_ids` back on the messages (`dialects.gym`). Hashes of them name the turn
that is meant, where several said the same words (`core.evidence.Echoed`).

Where no recorded turn has these ids (the store was restarted, or another proxy recorded the turn), they are only the client's word.
They become the beginning of a prompt if all of this holds:

1. The prompt and the generation of each reply are the beginning of the last reply's, so it is known where each reply stands.
2. The template's own rendering of these messages, with the generations in the places of their replies (`engine.template.tails`), begins
   with just these ids. So everything that is not a generation is what the template renders, token for token.
3. Each generation, read as text by the engine's `/detokenize`, says what the template writes for that message. Only what is always
   forgiven may differ: white space around a text, the form of arguments, reasoning that did not come back. A stop id ends a generation.
4. The engine says that it used the prompt (`proxy.recorder`), as for every other call.

What cannot be proven is not used: the engine renders. The proxy did not record these replies, so they are context in an export (mask 0).

A request may also require its prompt to begin with certain ids (`required_prefix_token_ids`). They are evidence of which turn is meant,
and a condition: a prompt that does not begin with them is not sent (`require_prefix`).
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from tokencache.core import ids
from tokencache.core.evidence import ReturnedIdHashes
from tokencache.core.messages import BLANK, Message, ToolCall, canonical_arguments, canonical_json, split_think
from tokencache.core.reasons import Reason
from tokencache.core.splice import fill
from tokencache.core.turn import hash_ids
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.gym import PREFIX, ReturnedIdFragments
from tokencache.engine.model import Model
from tokencache.engine.prompt_echo import read_ids
from tokencache.engine.template.edited import HistoryFrame
from tokencache.engine.template.learned import TailRefusedError
from tokencache.engine.template.shapes import TailRequest
from tokencache.errors import HarnessError
from tokencache.proxy.prefix_cache import CachedPrefix

log = logging.getLogger(__name__)


_JSON = json.JSONDecoder()
_NOTHING = ReturnedIdFragments(b"", b"")


class _Reply(NamedTuple):
    """A reply that came back with its ids (packed): its place among the messages, its prompt, its generation."""

    place: int
    prompt: bytes
    generation: bytes


class ReturnedIds(Mapping[int, ReturnedIdHashes]):
    """The ids that came back with the replies of a call's history, as hashes, by place; read and hashed when they are looked at."""

    def __init__(self, call: ChatCall) -> None:
        """Take the ids of a call; of messages that are no replies they say nothing."""
        replies = call.messages
        self._echoes = {place: echo for place, echo in call.echoes.items() if replies and replies[place].role == "assistant"}
        self._required = call.required_prefix
        self._last = next(call.conversation.replies(), -1) if call.conversation is not None else -1
        self._read: dict[int, _Reply | None] = {}

    @property
    def last(self) -> int:
        """The place of the last reply that came back with ids; -1 if none did."""
        return max(self._echoes, default=-1)

    def says(self, place: int, held: CachedPrefix) -> bool:
        """Whether the ids at a place are just a turn's prefix."""
        return is_prefix(self._echoes[place], held)

    def line(self) -> list[_Reply]:
        """List the replies whose ids are a beginning of the last one's, in order; empty if the last one's are no ids."""
        last = self._reply(self.last)
        if last is None:
            return []
        whole = last.prompt + last.generation
        replies = [self._reply(place) for place in sorted(self._echoes)]
        return [reply for reply in replies if reply is not None and whole.startswith(reply.prompt + reply.generation)]

    def _reply(self, place: int) -> _Reply | None:
        if place not in self._read:
            prompt, generation = read_echo(self._echoes.get(place, _NOTHING)) or (b"", b"")
            self._read[place] = _Reply(place, prompt, generation) if generation else None
        return self._read[place]

    def __getitem__(self, place: int) -> ReturnedIdHashes:
        """Return the hashes of the ids at a place.

        Raises:
            KeyError: no ids came back there.
        """
        reply = self._reply(place)
        if reply is not None:
            return hashed(reply.prompt, reply.generation)
        if self._required and place == self._last:
            return ReturnedIdHashes(hash_ids(self._required))
        raise KeyError(place)

    def __iter__(self) -> Iterator[int]:
        """The places at which ids came back."""
        places = {*self._echoes, *([self._last] if self._required and self._last >= 0 else [])}
        return (place for place in sorted(places) if self._reply(place) is not None or (self._required and place == self._last))

    def __len__(self) -> int:
        """At how many places ids came back."""
        return sum(1 for _ in self)


def read_echo(echo: ReturnedIdFragments) -> tuple[bytes, bytes] | None:
    """Read the ids of a prompt and its generation (packed); `None` if they are not lists of ids, or the prompt is empty."""
    prompt, generation = read_ids(b"[%s]" % echo.prompt), read_ids(b"[%s]" % echo.generation)
    return (prompt, generation) if prompt and generation is not None else None


def hashed(prompt: bytes, generation: bytes) -> ReturnedIdHashes:
    """Hash the ids of a prompt and its generation, as a turn's are hashed."""
    return ReturnedIdHashes(hash_ids(prompt + generation), hash_ids(generation))


def is_prefix(echo: ReturnedIdFragments, held: CachedPrefix) -> bool:
    """Whether ids that came back are just a turn's prefix, parted where its reply begins; compared as text."""
    generated = echo.generation.count(b",") + 1 if echo.generation else 0
    return generated == held.prefix.completion and b"".join(held.fragment) == echo.whole


class ClientPrompt(NamedTuple):
    """A proven prompt (packed ids) that begins with a client's ids, the places of the replies in these, and the last one's tokens."""

    ids: bytes
    places: tuple[int, ...]
    start: int
    end: int


async def prove(session: str, call: ChatCall, returned: ReturnedIds, model: Model) -> ClientPrompt:
    """Prove the ids that came back with the last reply, and put the template's tail behind them.

    Raises:
        TailRefusedError: they are not proven; the words say why.
        RenderError: the engine cannot say what its template renders, or what ids read as.
    """
    replies = returned.line()
    ended_early = any(not model.stop_ids.isdisjoint(ids.unpack(reply.generation)[:-1]) for reply in replies)
    if not replies or ended_early or not model.capability.tokenizes:
        raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
    last = replies[-1]
    assert call.conversation is not None  # noqa: S101 - messages came back
    ask = TailRequest(call.model, call.args, call.conversation, call.safe_messages(), last.place + 1, None, session)
    frame = await model.edited_histories.frame(ask, [reply.place for reply in replies])
    openers = [frame.generation_prompt(n, reply.prompt, same_message=True) for n, reply in enumerate(replies)]
    known = [opener for opener in openers if opener is not None]
    if len(known) < len(openers):
        raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
    prompt, spans = fill(frame.pieces, known, [reply.generation for reply in replies], model.stop_ids)
    apart = any(start != ids.count(reply.prompt) for reply, (start, _) in zip(replies, spans, strict=True))
    if apart or not prompt.startswith(last.prompt + last.generation):
        raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
    await _prove_words(call, replies, (frame, known), model)
    return ClientPrompt(prompt, tuple(reply.place for reply in replies), *spans[-1])


def require_prefix(session: str, call: ChatCall, prompt: bytes | None, reason: str = "") -> None:
    """Refuse a call whose prompt (packed ids) will not begin with the ids that its client requires; `None`: the engine renders, and why.

    Raises:
        HarnessError: it will not; the message says what the client can do.
    """
    required = call.required_prefix
    if not required or (prompt is not None and prompt.startswith(required)):
        return
    how = f"the engine renders it ({reason})" if reason else "it has no recorded reply before it"
    if prompt is not None:
        how = f"it differs from them at index {ids.common_head(prompt, required)}"
    log.warning("session %s: a call is refused: its prompt does not begin with %d required ids: %s", session, ids.count(required), how)
    raise HarnessError(
        f"the prompt of this call does not begin with the {ids.count(required)} ids of {PREFIX!r}: {how}. Within a session the proxy "
        f"supplies the exact ids of the replies that it recorded: leave {PREFIX!r} out, or send the ids that came with the messages back",
        param=PREFIX,
    )


async def _prove_words(call: ChatCall, replies: Sequence[_Reply], stands: tuple[HistoryFrame, Sequence[bytes]], model: Model) -> None:
    """Prove that each generation says what the template writes for its message; `stands`: what stands around replies, and what opens each.

    Raises:
        TailRefusedError: one does not.
        RenderError: the engine cannot say.
    """

    async def read(packed: bytes) -> str:
        return await model.renderer.read(call.model, packed) if packed else ""

    frame, openers = stands
    rendered = await read(await model.renderer.render(call.model, call.safe_messages(), call.args, generation=True))
    written = _between(rendered, [await read(piece) for piece in frame.pieces])
    for reply, opener, head, own in zip(replies, openers, frame.openings, written, strict=True):
        header = (await read(ids.head(opener, ids.common_head(opener, head or b"")))).partition("<think>")[0]  # reasoning is the reply's
        sampled = await read(opener + _unstopped(reply.generation, model))
        message = call.messages[reply.place]
        if not all(_is_shown(call, sampled) for call in message.calls):
            raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
        if not own.startswith(header) or not _same_words(sampled.removeprefix(header), own.removeprefix(header), message):
            raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)


def _is_shown(call: ToolCall, sampled: str) -> bool:
    """Whether a sampled text names a call, and the template can write its arguments.

    Kimi-K2's template writes calls without their names. Arguments that are no JSON object are rendered as an empty one.
    """
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return False
    return isinstance(arguments, dict) and re.search(rf"(?<!\w){re.escape(call.name)}(?!\w)", sampled) is not None


def _unstopped(generation: bytes, model: Model) -> bytes:
    """A generation without the stop id that ended it."""
    stopped = ids.unpack(generation[-ids.ID_BYTES :])[0] in model.stop_ids
    return generation[: -ids.ID_BYTES] if stopped else generation


def _between(rendered: str, pieces: Sequence[str]) -> list[str]:
    """Find what stands between the pieces of a rendering, which together are all of it.

    Raises:
        TailRefusedError: the pieces do not stand in it, in order, from its beginning to its end.
    """
    first, *inner, last = pieces
    if not rendered.startswith(first) or not rendered.endswith(last) or len(rendered) < len(first) + len(last):
        raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
    rest = rendered[len(first) : len(rendered) - len(last)]
    found = []
    for piece in inner:
        own, there, rest = rest.partition(piece)
        if not there:
            raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
        found.append(own)
    return [*found, rest]


def _same_words(sampled: str, written: str, message: Message) -> bool:
    """Whether a sampled text is a message that the template writes as `written`.

    What the verdicts always forgive is forgiven here: white space around a text, the form of arguments, reasoning that did not come back
    (`core.rules`). A text that was cut may be reasoning as a whole: then all of it must have come back.
    """
    (ours, said), (theirs, shown) = split_think(sampled), split_think(written)
    if not ours and not shown and message.thought == said.removeprefix("<think>").strip(BLANK):
        return True
    return _plain(said, message) == _plain(shown, message) and {theirs, message.thought} <= {ours, ""}


def _plain(text: str, message: Message) -> str:
    """Write a message's calls in one form in a text: JSON of their arguments, by themselves or as a member, and white space before them."""
    own = message.text if message.calls and text.startswith(message.text) else ""
    wanted = {canonical_arguments(call.arguments) for call in message.calls}
    parts, rest, at = [own], text[len(own) :].strip(BLANK), 0
    while wanted and (start := rest.find("{", at)) >= 0:
        end = start + 1
        with suppress(ValueError, RecursionError):
            value, behind = _JSON.raw_decode(rest, start)
            if not wanted.isdisjoint(map(canonical_json, (value, *value.values()))):
                parts.append(rest[at:start] + canonical_json(value).decode())
                at = end = behind
        parts.append(rest[at:end])
        at = end
    return "".join([*parts, rest[at:]])

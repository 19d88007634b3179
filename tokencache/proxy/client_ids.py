"""Uses the token ids that clients send back with a history: as evidence, as the beginning of a prompt, and to find differences.

Agents of NeMo Gym send `prompt_token_ids` and `generation_token_ids` back on the messages (`dialects.gym`). If several turns have the same
words, hashes of these ids identify the turn (`core.evidence.ReturnedIdHashes`).

If no recorded turn has these ids (the store was restarted, or another proxy recorded the turn), only the client's message supports them.
They become the beginning of a prompt if all of this holds (`prove`):

1. The prompt and generation of each reply together are a beginning of the last reply's, so the place of each reply in it is known.
2. The template's own rendering of these messages, with the generations in place of the replies (`engine.template.edited`), begins with
   these ids. So everything except the generations is what the template renders, token for token.
3. Each generation, decoded by the engine's `/detokenize`, has the words that the template writes for that message. Only differences that
   every client may make are allowed: whitespace around a text, the form of arguments, missing reasoning. A stop id ends a generation.
4. The engine reports that it used the prompt (`proxy.recorder`), as for every other call.

Ids that cannot be proven are not used, and the engine renders. The proxy did not record these replies, so they are context in an export
(mask 0).

The record always takes precedence. But a client that sends back other ids than it received also gives other ids to its trainer. A client
that sends back unrecorded ids trains on a turn that this session lacks. `compare` reports both as incidents:

`echo-differs`      the words of a recorded turn have other ids, or its ids have other words; the ids are not used
`echo-unrecorded`   no recorded turn has these words and these ids: the store was restarted, or another proxy recorded the turn

A request may also require its prompt to begin with certain ids (`required_prefix_token_ids`). They are evidence for the turn, and a
condition: a prompt that does not begin with them is not sent (`require_prefix`).
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tokencache.core import ids
from tokencache.core.evidence import ReturnedIdHashes
from tokencache.core.incidents import IncidentKind
from tokencache.core.messages import BLANK, Message, ToolCall, canonical_arguments, canonical_json, digest, split_think
from tokencache.core.reasons import Reason
from tokencache.core.splice import fill
from tokencache.core.turn import Turn, hash_ids
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.gym import PREFIX, ReturnedIdFragments
from tokencache.engine.model import Model
from tokencache.engine.prompt_echo import read_ids
from tokencache.engine.template.edited import HistoryFrame
from tokencache.engine.template.learned import TailRefusedError
from tokencache.engine.template.shapes import TailRequest
from tokencache.errors import HarnessError
from tokencache.proxy.facts import BegunCall
from tokencache.proxy.plan import Plan
from tokencache.proxy.prefix_cache import CachedPrefix, PrefixCache
from tokencache.store.base import Store, StoreError

log = logging.getLogger(__name__)

_JSON = json.JSONDecoder()
_WORD = re.compile(r"\w")
_OBJECT = re.compile(r'\{\s*+["}]')
_NOTHING = ReturnedIdFragments(b"", b"")
_LONGEST_NAME = 256
"""Characters of a tool's name; ids are not proven for a call with a longer one."""
_ROUGHLY_LINEAR = 16
"""The JSON in a text is normalized only if it can be read in so many passes over the text: nested objects may each be read."""
_FEW = 10_000
"""Characters that are read in any case."""
_FEWER = 64
"""Counting lines is at least that many times faster than parsing, by character."""
_MOST_LISTED = 8
"""Maximum number of messages that an incident lists."""


class _Reply(NamedTuple):
    """An echo with packed ids: its place among the messages, its prompt, its generation."""

    place: int
    prompt: bytes
    generation: bytes


class ReturnedIds(Mapping[int, ReturnedIdHashes]):
    """Hashes of the ids that a client sent with the echoes in its history, by place. They are parsed and hashed on first use."""

    def __init__(self, call: ChatCall) -> None:
        """Use the ids of a call; ids on other messages than replies are ignored."""
        self._echoes = _echoes_of_replies(call)
        self._required = call.required_prefix
        self._last = call.conversation.replies[-1] if call.conversation is not None and call.conversation.replies else -1
        self._read: dict[int, _Reply | None] = {}

    @property
    def last(self) -> int:
        """The place of the last echo with ids; -1 if there is none."""
        return max(self._echoes, default=-1)

    def is_prefix(self, place: int, prefix: CachedPrefix) -> bool:
        """Whether the ids at a place are exactly a turn's prefix."""
        return _is_prefix(self._echoes[place], prefix)

    def line(self) -> list[_Reply]:
        """List the replies with ids that are a beginning of the last reply's ids, in order; empty if the last reply's are not valid."""
        last = self._reply(self.last)
        if last is None:
            return []
        whole = last.prompt + last.generation
        replies = [self._reply(place) for place in sorted(self._echoes)]
        return [reply for reply in replies if reply is not None and whole.startswith(reply.prompt + reply.generation)]

    def _reply(self, place: int) -> _Reply | None:
        if place not in self._read:
            prompt, generation = _read_echo(self._echoes.get(place, _NOTHING)) or (b"", b"")
            self._read[place] = _Reply(place, prompt, generation) if generation else None
        return self._read[place]

    def __getitem__(self, place: int) -> ReturnedIdHashes:
        """Return the hashes of the ids at a place.

        Raises:
            KeyError: there are no ids at this place.
        """
        reply = self._reply(place)
        if reply is not None:
            return _hashes(reply.prompt, reply.generation)
        if self._required and place == self._last:
            return ReturnedIdHashes(hash_ids(self._required))
        raise KeyError(place)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the places with ids, in order."""
        places = {*self._echoes, *([self._last] if self._required and self._last >= 0 else [])}
        return (place for place in sorted(places) if self._reply(place) is not None or (self._required and place == self._last))

    def __len__(self) -> int:
        """Return the number of places with ids."""
        return sum(1 for _ in self)


def _echoes_of_replies(call: ChatCall) -> dict[int, ReturnedIdFragments]:
    return {place: echo for place, echo in call.echoes.items() if call.messages and call.messages[place].role == "assistant"}


def _read_echo(echo: ReturnedIdFragments) -> tuple[bytes, bytes] | None:
    """Parse the ids of a prompt and its generation (packed); `None` if they are not lists of ids, or the prompt is empty."""
    prompt, generation = read_ids(b"[%s]" % echo.prompt), read_ids(b"[%s]" % echo.generation)
    return (prompt, generation) if prompt and generation is not None else None


def _hashes(prompt: bytes, generation: bytes) -> ReturnedIdHashes:
    """Hash the ids of a prompt and its generation like those of a turn."""
    return ReturnedIdHashes(hash_ids(prompt + generation), hash_ids(generation))


def _is_prefix(echo: ReturnedIdFragments, prefix: CachedPrefix) -> bool:
    """Whether returned ids are exactly a turn's prefix, and divided where its reply begins; compared as text."""
    generated = echo.generation.count(b",") + 1 if echo.generation else 0
    return generated == prefix.prefix.completion and bytes(prefix.fragment) == echo.whole


# --- ids that are not recorded, as the beginning of a prompt ---


class ClientPrompt(NamedTuple):
    """A proven prompt that begins with a client's ids.

    Attributes:
        ids: the packed prompt.
        places: the places of the replies in the client's ids.
        start: the first token of the last of them.
        end: the token after it.
    """

    ids: bytes
    places: tuple[int, ...]
    start: int
    end: int


async def prove(session: str, call: ChatCall, returned: ReturnedIds, model: Model) -> ClientPrompt:
    """Prove the ids that the client sent back with the last reply, and add the template's tail.

    Raises:
        TailRefusedError: the ids cannot be proven.
        RenderError: the engine cannot render or decode now.
    """
    replies = returned.line()
    ended_early = any(not model.stop_ids.isdisjoint(ids.unpack(reply.generation)[:-1]) for reply in replies)
    if not replies or ended_early or not model.capability.tokenizes:
        raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
    last = replies[-1]
    assert call.conversation is not None  # noqa: S101 - there are returned messages
    reply = call.conversation.messages[last.place]
    request = TailRequest(call.model, call.args, call.conversation, call.safe_messages(), last.place + 1, reply, session=session)
    frame = await model.edited_histories.frame(request, [reply.place for reply in replies])
    prompts = [frame.generation_prompt(n, reply.prompt, same_message=True) for n, reply in enumerate(replies)]
    known = [prompt for prompt in prompts if prompt is not None]
    if len(known) < len(prompts):
        raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
    prompt, spans = fill(frame.gaps, known, [reply.generation for reply in replies], model.stop_ids)
    displaced = any(start != ids.count(reply.prompt) for reply, (start, _) in zip(replies, spans, strict=True))
    if displaced or not prompt.startswith(last.prompt + last.generation):
        raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
    await _prove_words(call, replies, frame, known, model)
    return ClientPrompt(prompt, tuple(reply.place for reply in replies), *spans[-1])


async def _prove_words(call: ChatCall, replies: Sequence[_Reply], frame: HistoryFrame, prompts: Sequence[bytes], model: Model) -> None:
    """Prove that each generation has the words that the template writes for its message; `prompts` are the generation prompts.

    Raises:
        TailRefusedError: a generation has other words.
        RenderError: the engine cannot decode now.
    """

    async def read(packed: bytes) -> str:
        return await model.renderer.read(call.model, packed) if packed else ""

    rendered = await read(await model.renderer.render(call.model, call.safe_messages(), call.args, generation=True))
    written = _between(rendered, [await read(gap) for gap in frame.gaps])
    for reply, prompt, opening, own in zip(replies, prompts, frame.openings, written, strict=True):
        header = (await read(ids.head(prompt, ids.common_head(prompt, opening or b"")))).partition("<think>")[0]  # reasoning is the reply's
        sampled = await read(prompt + _without_stop(reply.generation, model))
        message = call.messages[reply.place]
        if not all(_is_shown(call, sampled) for call in message.calls):
            raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
        if not own.startswith(header) or not _same_words(sampled.removeprefix(header), own.removeprefix(header), message):
            raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)


def _is_shown(call: ToolCall, sampled: str) -> bool:
    """Whether a sampled text names a call, and the template can write its arguments.

    Kimi-K2's template writes calls without their names. Arguments that are not a JSON object are rendered as an empty one.
    """
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return False
    return isinstance(arguments, dict) and _has_word(sampled, call.name)


def _has_word(text: str, name: str) -> bool:
    """Whether a text has a name without letters, digits or `_` on either side."""
    at = text.find(name) if len(name) <= _LONGEST_NAME else -1
    while at >= 0:
        if not _WORD.match(text[at - 1 : at]) and not _WORD.match(text, at + len(name)):
            return True
        at = text.find(name, at + 1)
    return False


def _without_stop(generation: bytes, model: Model) -> bytes:
    stopped = ids.unpack(generation[-ids.ID_BYTES :])[0] in model.stop_ids
    return generation[: -ids.ID_BYTES] if stopped else generation


def _between(rendered: str, gaps: Sequence[str]) -> list[str]:
    """Return the texts between the gaps of a rendering, which begins with the first gap and ends with the last.

    Raises:
        TailRefusedError: the rendering does not contain the gaps in this order.
    """
    first, *inner, last = gaps
    if not rendered.startswith(first) or not rendered.endswith(last) or len(rendered) < len(first) + len(last):
        raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
    rest = rendered[len(first) : len(rendered) - len(last)]
    found = []
    for gap in inner:
        own, there, rest = rest.partition(gap)
        if not there:
            raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN)
        found.append(own)
    return [*found, rest]


def _same_words(sampled: str, written: str, message: Message) -> bool:
    """Whether a sampled text is a message that the template writes as `written`.

    The comparison ignores what verdicts always ignore (`core.rules`): whitespace around a text, the form of arguments, missing reasoning.
    If a reply was cut, all of its text may be reasoning. Then the message must contain all of that reasoning.
    """
    (ours, said), (theirs, shown) = split_think(sampled), split_think(written)
    if not ours and not shown and message.thought == said.removeprefix("<think>").strip(BLANK):
        return True
    return _plain(said, message) == _plain(shown, message) and {theirs, message.thought} <= {ours, ""}


def _plain(text: str, message: Message) -> str:
    """Normalize a message's calls in a text: the JSON of their arguments, alone or as a member, and the whitespace before them."""
    own = message.text if message.calls and text.startswith(message.text) else ""
    wanted = {canonical_arguments(call.arguments) for call in message.calls}
    parts, rest, at = [own], text[len(own) :].strip(BLANK), 0
    left = _FEW + _ROUGHLY_LINEAR * len(rest)
    while wanted and left > 0 and (found := _OBJECT.search(rest, at)):
        start = found.start()
        end = after = start + 1
        try:
            value, after = _JSON.raw_decode(rest, start)
            if not wanted.isdisjoint(map(canonical_json, (value, *value.values()))):
                parts.append(rest[at:start] + canonical_json(value).decode())
                at = end = after
        except json.JSONDecodeError as why:
            left -= start // _FEWER  # the error counts the lines before it
            after = len(rest) if why.msg.startswith("Unterminated") else why.pos  # such a string was read to the end of the text
        except (ValueError, RecursionError):
            after = len(rest)
        left -= after - start
        parts.append(rest[at:end])
        at = end
    return "".join([*parts, rest[at:]])


# --- differences between returned and recorded ids ---


async def compare(call: BegunCall, plan: Plan, prefixes: PrefixCache, store: Store) -> None:
    """Compare the ids that a client sent back with a call with the recorded ids, and note incidents where they differ.

    In a lineage each turn's ids are a beginning of the next turn's prompt. So the returned ids are compared, as text, with the cached
    prefix that the call continues. Only ids that are not a beginning of it are looked up among the session's turns. If the store does not
    answer, nothing is compared.
    """
    echoes, conversation, used = _echoes_of_replies(call.chat), call.chat.conversation, plan.client_places
    if not echoes or conversation is None:
        return
    try:
        if plan.parent is not None and plan.basis.messages:
            prefix = await prefixes.get(call.session, plan.parent)
            beginning = bytes(prefix.fragment)
            # The division of an older reply was checked when it was the last one.
            echoes = {
                place: echo
                for place, echo in echoes.items()
                if not (_is_prefix(echo, prefix) if place == plan.basis.messages else beginning.startswith(echo.whole + b","))
            }
        known = await store.turns(call.session) if echoes else []
    except (StoreError, KeyError, ValueError) as why:
        log.debug("session %s: returned token ids are not compared: %s", call.session, why)
        return
    digests = conversation.digests
    turns = {place: _turns_with(echo, known) for place, echo in echoes.items()}
    wrong = [place for place, found in turns.items() if digests[place] not in {digest(turn.served) for turn in found}]
    recorded_words = {digest(turn.served) for turn in known}
    differs = [place for place in wrong if (digests[place] in recorded_words or turns[place]) and place not in used]
    unrecorded = [place for place in wrong if place not in differs]
    if differs:
        detail = f"{_listed(differs)}: these words and these token ids were not recorded together; the ids are not used"
        call.note(IncidentKind.ECHO_DIFFERS, detail)
    if unrecorded:
        use = "the prompt begins with them" if used else "they are not used"
        words = "the client sent token ids that are not recorded here (the store was restarted, or another proxy recorded them)"
        call.note(IncidentKind.ECHO_UNRECORDED, f"{_listed(unrecorded)}: {words}; {use}")


def _listed(places: Sequence[int]) -> str:
    more = f" and {len(places) - _MOST_LISTED} more" if len(places) > _MOST_LISTED else ""
    return f"messages {', '.join(map(str, places[:_MOST_LISTED]))}{more}"


def _turns_with(echo: ReturnedIdFragments, known: list[Turn]) -> list[Turn]:
    """Return the turns that were recorded with these ids."""
    read = _read_echo(echo)
    if read is None:
        return []
    hashes = _hashes(*read)
    return [turn for turn in known if hashes.names(turn)]


# --- ids that a client requires ---


def require_prefix(session: str, call: ChatCall, prompt: bytes | None, reason: str = "") -> None:
    """Refuse a call if its prompt does not begin with the ids that its client requires.

    Args:
        session: the session's name.
        call: the call.
        prompt: the packed prompt; `None` if the engine renders.
        reason: why the engine renders.

    Raises:
        HarnessError: the prompt does not begin with them; the message explains what the client can do.
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

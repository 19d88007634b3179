"""Chains: the digest of a conversation up to each of its messages.

`chain[i]` covers the first `i` messages and what else shapes the prompt (model, tools, template arguments: the
*scope*). So "this history continues that turn" is one look-up of 16 bytes, and a turn whose context was edited in any
message before it is simply not found. The price is the work of one short hash per message.

A reply is linked by what it says however it is written (`canonical.digest`), all other messages by what a template can see of
them (`canonical.exact`). Which assistant messages are replies is not known here: what the digest leaves out of them is covered by a
second chain, `written` (`evidence`).

The scope is hashed with the deployment's secret. So nobody who knows this code can tell under which keys a conversation
is found, or look for two that meet: what the links add to an unknown beginning may be hashed fast (xxh3-128).

A tool result is also linked by *which* call of the reply before it it answers.

Keys: under what a reply is found again. A key says where to look; what is found there is judged field by field.

Every reply that a harness was given whole is found under up to four keys, and one that it was not under two:

=====  ======================  =============================================================================================
first  of                      finds the reply
=====  ======================  =============================================================================================
`c`    the chain through it    where nothing before it was touched: nearly always, and at the first look
`r`    its digest              wherever it stands, under the same model
`i`    its first call's id     the same, if its words were rewritten
`h`    the call's handle       the same, in a dialect that lets us give one out
`p`    the chain before it     in its place, of a harness that left before it was whole: a beginning of it may come back
`a`    the model               the same, wherever it stands: so that no other reply is taken for such a beginning
`q`    the whole request       for a call that asks for the same again (`proxy.dedup.fingerprint`); each turn stores it
=====  ======================  =============================================================================================

No key but the chain's names the template's arguments: two replies of the same words, one sampled with thinking and one without,
must be seen side by side, or the wrong one would be taken for certain.

Changes of a text that somebody vouches for can be told beforehand (`rewrites.foretold`): such a reply has its `c` and `r`
keys twice, and its rewriting is found like any other echo, as are two replies that rewriting makes alike.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

import msgspec
import xxhash

from tokencache.core.messages import Message, ToolCall, digest, exact_digest
from tokencache.core.rules import STRICT, Leniency, expected_rewritings
from tokencache.core.verdict import safe_id

FIRST_CALL = "calls"
"""Where the first call is made, among the debuts of roles."""


class Conversation(msgspec.Struct, frozen=True):
    """A history in canonical form.

    `chain` and `written` have one entry more than `messages`: `chain[i]` covers `messages[:i]`, and `written[i]` the assistant's
    messages among them, as they are written. `digests[i]` and `exacts[i]` are those of `messages[i]` alone. `voice` names the model.
    `salt` is for keys of values that the conversation does not contain. `debuts` maps each role to its first message, and
    `FIRST_CALL` to the first message with a call.
    """

    messages: tuple[Message, ...]
    digests: tuple[bytes, ...]
    exacts: tuple[bytes, ...]
    chain: tuple[bytes, ...]
    written: tuple[bytes, ...]
    voice: bytes = b""
    salt: bytes = b""
    debuts: dict[str, int] = {}

    def replies(self) -> Iterator[int]:
        """The places of the assistant's messages, the last one first; rarely more than the first is asked for."""
        return (i for i in range(len(self.messages) - 1, -1, -1) if self.messages[i].role == "assistant")

    @property
    def systems(self) -> int:
        """The number of system messages in front."""
        return next((i for i, message in enumerate(self.messages) if message.role != "system"), len(self.messages))

    @property
    def context(self) -> bytes:
        """What the conversation starts from: the scope and the system messages in front (16 bytes)."""
        return self.chain[self.systems]


def build_conversation(
    scope: bytes,
    messages: Sequence[Message],
    digests: Sequence[bytes] | None = None,
    exacts: Sequence[bytes] | None = None,
    *,
    voice: bytes = b"",
    secret: bytes = b"",
) -> Conversation:
    """Chain `messages` under `scope`, which names all else that shapes the prompt.

    `digests` and `exacts` are those of the messages, if the caller has them already; `voice` names what `Conversation.voice` is made of;
    `secret` is the deployment's, at most 64 bytes.
    """
    start = Conversation(
        messages=(),
        digests=(),
        exacts=(),
        chain=(keyed_hash(secret, b"scope" + scope),),
        written=(keyed_hash(secret, b"written"),),
        voice=keyed_hash(secret, b"voice" + voice),
        salt=keyed_hash(secret, b"salt"),
    )
    digests = digests if digests is not None else [digest(m) for m in messages]
    return extend(start, messages, digests, exacts if exacts is not None else [exact_digest(m) for m in messages])


def extend(known: Conversation, messages: Sequence[Message], digests: Sequence[bytes], exacts: Sequence[bytes]) -> Conversation:
    """Chain further messages, with their digests, to a conversation: work for the new ones only."""
    chain, written = list(known.chain), list(known.written)
    calls = next((m.calls for m in reversed(known.messages) if m.role == "assistant"), ())
    placed = [*enumerate(messages, len(known.messages))]
    debuts = {message.role: place for place, message in reversed(placed)} | known.debuts
    if FIRST_CALL not in debuts and (first := next((place for place, message in placed if message.calls), None)) is not None:
        debuts[FIRST_CALL] = first
    for message, own, spelled in zip(messages, digests, exacts, strict=True):
        if message.role == "assistant":
            calls = message.calls
            chain.append(link(chain[-1], message, own))
            written.append(xxhash.xxh3_128_digest(written[-1] + spelled))
        else:
            chain.append(link(chain[-1], message, spelled, calls))
            written.append(written[-1])
    return Conversation(
        messages=(*known.messages, *messages),
        digests=(*known.digests, *digests),
        exacts=(*known.exacts, *exacts),
        chain=tuple(chain),
        written=tuple(written),
        voice=known.voice,
        salt=known.salt,
        debuts=debuts,
    )


def keyed_hash(secret: bytes, data: bytes) -> bytes:
    """Hash with a secret: BLAKE2b (RFC 7693), 16 bytes. Who has not the secret can neither compute it nor find two that collide."""
    return hashlib.blake2b(data, digest_size=16, key=secret).digest()


def link(previous: bytes, message: Message, own: bytes, calls: tuple[ToolCall, ...] = ()) -> bytes:
    """Extend a chain by one message; `own` is what it is linked by, `calls` are those of the last reply before it."""
    if message.role != "tool":
        return xxhash.xxh3_128_digest(previous + own)
    return xxhash.xxh3_128_digest(previous + own + _answered(message.answers or "", calls))


def _answered(answers: str, calls: tuple[ToolCall, ...]) -> bytes:
    for n, call in enumerate(calls):
        if call.id == answers:
            return b"call:%d" % n
    return b"id:" + answers.encode("utf-8", "surrogatepass")


def chain_key(chain: bytes) -> bytes:
    """Name a place in a conversation, the reply that leads there being the last message: 17 bytes."""
    return b"c" + chain


def position_key(chain: bytes) -> bytes:
    """Name the place in a conversation behind which something was said: 17 bytes."""
    return b"p" + chain


def reply_key(digest: bytes, voice: bytes) -> bytes:
    """Name a reply regardless of its context, but not of the model that it was sampled from: 17 bytes."""
    return b"r" + xxhash.xxh3_128_digest(voice + digest)


def aborted_key(voice: bytes) -> bytes:
    """Name all replies of this model that a harness has left: 17 bytes."""
    return b"a" + xxhash.xxh3_128_digest(voice)


def request_key(imprint: bytes) -> bytes:
    """Name all replies to one and the same request, of which this is the imprint: 17 bytes."""
    return b"q" + imprint


def call_key(conversation: Conversation, i: int) -> bytes:
    """Name the first call of the reply `messages[i]` by its id: 17 bytes, or none if it has no such call."""
    return _call_key(conversation.messages[i], conversation.voice)


def _call_key(message: Message, voice: bytes) -> bytes:
    if not message.calls or not message.calls[0].id:
        return b""
    return b"i" + xxhash.xxh3_128_digest(voice + safe_id(message.calls[0].id).encode("utf-8", "surrogatepass"))


def handle_key(handle: str, salt: bytes) -> bytes:
    """Name a reply by the handle that was given out with it: 17 bytes, or none without one; `salt` is that of its conversation."""
    return b"h" + xxhash.xxh3_128_digest(salt + handle.encode("utf-8", "surrogatepass")) if handle else b""


def turn_keys(
    conversation: Conversation, served: Message, own: bytes, *, handle: str = "", leniency: Leniency = STRICT
) -> tuple[bytes, ...]:
    """The keys under which a reply to `conversation` will be looked for; `own` is the digest of `served`."""
    told = [(served, own), *((message, digest(message)) for message in expected_rewritings(served, leniency))]
    chains = [chain_key(link(conversation.chain[-1], message, name)) for message, name in told]
    digests = [reply_key(name, conversation.voice) for _, name in told]
    names = filter(None, (_call_key(served, conversation.voice), handle_key(handle, conversation.salt)))
    return (*dict.fromkeys(chains), *dict.fromkeys(digests), *names)


def aborted_turn_keys(conversation: Conversation) -> tuple[bytes, ...]:
    """The keys of a reply to `conversation` of which nobody knows how much its harness was given."""
    return position_key(conversation.chain[-1]), aborted_key(conversation.voice)


def lookup_keys(conversation: Conversation, last: int | None = None, handles: Mapping[int, str] = MappingProxyType({})) -> list[bytes]:
    """The keys to look up for a history, the deepest first; the first `c` key that is known ends the search.

    `last` takes those of so many of its last replies only: nearly always the very last one is known. The `p` key stands
    first: it is known where a harness has left, and then the reply may be a beginning as well as a whole. No key is named twice, though
    two replies may have one: equal words, or equal ids of calls.
    """
    keys: dict[bytes, None] = {}
    for i in islice(conversation.replies(), last):
        names = (call_key(conversation, i), handle_key(handles.get(i, ""), conversation.salt))
        places = (position_key(conversation.chain[i]), chain_key(conversation.chain[i + 1]))
        keys |= dict.fromkeys((*places, reply_key(conversation.digests[i], conversation.voice), *filter(None, names)))
    return list(keys)

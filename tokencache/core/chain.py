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
"""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

from tokencache.core.messages import Message, ToolCall, digest, exact

CALLS = "calls"
"""Where the first call is made, among the debuts of roles."""


class Conversation(msgspec.Struct, frozen=True):
    """A history in canonical form.

    `chain` and `written` have one entry more than `messages`: `chain[i]` covers `messages[:i]`, and `written[i]` the assistant's
    messages among them, as they are written. `digests[i]` and `exacts[i]` are those of `messages[i]` alone. `voice` names the model.
    `salt` is for keys of values that the conversation does not contain. `debuts` maps each role to its first message, and `CALLS` to the
    first message with a call.
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


def converse(
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
        chain=(keyed(secret, b"scope" + scope),),
        written=(keyed(secret, b"written"),),
        voice=keyed(secret, b"voice" + voice),
        salt=keyed(secret, b"salt"),
    )
    digests = digests if digests is not None else [digest(m) for m in messages]
    return extend(start, messages, digests, exacts if exacts is not None else [exact(m) for m in messages])


def extend(known: Conversation, messages: Sequence[Message], digests: Sequence[bytes], exacts: Sequence[bytes]) -> Conversation:
    """Chain further messages, with their digests, to a conversation: work for the new ones only."""
    chain, written = list(known.chain), list(known.written)
    calls = next((m.calls for m in reversed(known.messages) if m.role == "assistant"), ())
    placed = [*enumerate(messages, len(known.messages))]
    debuts = {message.role: place for place, message in reversed(placed)} | known.debuts
    if CALLS not in debuts and (first := next((place for place, message in placed if message.calls), None)) is not None:
        debuts[CALLS] = first
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


def keyed(secret: bytes, data: bytes) -> bytes:
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

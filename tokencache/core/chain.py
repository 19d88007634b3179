"""Chains: the digest of a conversation up to each of its messages.

`chain[i]` covers the first `i` messages and what else shapes the prompt (model, tools, template arguments: the
*scope*). So "this history continues that turn" is one look-up of 16 bytes, and a turn whose context was edited in any
message before it is simply not found. The price is the work of one short hash per message.

The scope and the voice are hashed with the deployment's secret. So nobody who knows this code can tell under which keys a conversation
is found, or look for two that meet: what the links add to an unknown beginning may be hashed fast (xxh3-128).

A tool result is linked by *which* call of the reply before it it answers, not by the call's id: harnesses rewrite ids.
"""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

from tokencache.core.canonical import Call, Message, digest


class Conversation(msgspec.Struct, frozen=True):
    """A history in canonical form.

    `chain` has one entry more than `messages`: `chain[i]` covers `messages[:i]`. `digests[i]` is that of `messages[i]`
    alone. `voice` names what a reply is sampled under whatever its context: the model and the template's arguments. `salt` is for
    keys of what is said nowhere in it: handles. `debuts` is where each role speaks first.
    """

    messages: tuple[Message, ...]
    digests: tuple[bytes, ...]
    chain: tuple[bytes, ...]
    voice: bytes = b""
    salt: bytes = b""
    debuts: dict[str, int] = {}

    def replies(self) -> Iterator[int]:
        """The places of the assistant's messages, the last one first; rarely more than the first is asked for."""
        return (i for i in range(len(self.messages) - 1, -1, -1) if self.messages[i].role == "assistant")


def converse(
    scope: bytes, messages: Sequence[Message], digests: Sequence[bytes] | None = None, *, voice: bytes = b"", secret: bytes = b""
) -> Conversation:
    """Chain `messages` under `scope`, which names all else that shapes the prompt.

    `digests` are those of the messages, if the caller has them already; `voice` names what `Conversation.voice` is made of; `secret` is the
    deployment's, at most 64 bytes.
    """
    start = Conversation((), (), (keyed(secret, b"scope" + scope),), keyed(secret, b"voice" + voice), keyed(secret, b"salt"))
    return extend(start, messages, digests if digests is not None else [digest(m) for m in messages])


def extend(known: Conversation, messages: Sequence[Message], digests: Sequence[bytes]) -> Conversation:
    """Chain further messages, with their digests, to a conversation: work for the new ones only."""
    chain = list(known.chain)
    calls = next((m.calls for m in reversed(known.messages) if m.role == "assistant"), ())
    debuts = {message.role: place for place, message in reversed([*enumerate(messages, len(known.messages))])} | known.debuts
    for message, own in zip(messages, digests, strict=True):
        if message.role == "assistant":
            calls = message.calls
        chain.append(link(chain[-1], message, own, calls))
    return Conversation((*known.messages, *messages), (*known.digests, *digests), tuple(chain), known.voice, known.salt, debuts)


def keyed(secret: bytes, data: bytes) -> bytes:
    """Hash with a secret: BLAKE2b (RFC 7693), 16 bytes. Who has not the secret can neither compute it nor find two that collide."""
    return hashlib.blake2b(data, digest_size=16, key=secret).digest()


def link(previous: bytes, message: Message, own: bytes, calls: tuple[Call, ...] = ()) -> bytes:
    """Extend a chain by one message; `calls` are those of the last reply before it."""
    if message.role != "tool":
        return xxhash.xxh3_128_digest(previous + own)
    return xxhash.xxh3_128_digest(previous + own + _answered(message.answers or "", calls))


def _answered(answers: str, calls: tuple[Call, ...]) -> bytes:
    for n, call in enumerate(calls):
        if call.id == answers:
            return b"call:%d" % n
    return b"id:" + answers.encode("utf-8", "surrogatepass")

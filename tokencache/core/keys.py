"""Keys: under what a reply is found again. A key says where to look; what is found there is judged field by field.

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

from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType

import xxhash

from tokencache.core.chain import Conversation, link
from tokencache.core.messages import Message, digest
from tokencache.core.rewrites import foretold
from tokencache.core.rules import STRICT, Leniency
from tokencache.core.verdict import safe_id


def chain_key(chain: bytes) -> bytes:
    """Name a place in a conversation, the reply that leads there being the last message: 17 bytes."""
    return b"c" + chain


def place_key(chain: bytes) -> bytes:
    """Name the place in a conversation behind which something was said: 17 bytes."""
    return b"p" + chain


def reply_key(digest: bytes, voice: bytes) -> bytes:
    """Name a reply regardless of its context, but not of the model that it was sampled from: 17 bytes."""
    return b"r" + xxhash.xxh3_128_digest(voice + digest)


def aborted_key(voice: bytes) -> bytes:
    """Name all replies of this model that a harness has left: 17 bytes."""
    return b"a" + xxhash.xxh3_128_digest(voice)


def repeat_key(imprint: bytes) -> bytes:
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


def keys_of_turn(
    conversation: Conversation, served: Message, own: bytes, *, handle: str = "", leniency: Leniency = STRICT
) -> tuple[bytes, ...]:
    """The keys under which a reply to `conversation` will be looked for; `own` is the digest of `served`."""
    told = [(served, own), *((message, digest(message)) for message in foretold(served, leniency))]
    chains = [chain_key(link(conversation.chain[-1], message, name)) for message, name in told]
    digests = [reply_key(name, conversation.voice) for _, name in told]
    names = filter(None, (_call_key(served, conversation.voice), handle_key(handle, conversation.salt)))
    return (*dict.fromkeys(chains), *dict.fromkeys(digests), *names)


def keys_of_aborted(conversation: Conversation) -> tuple[bytes, ...]:
    """The keys of a reply to `conversation` of which nobody knows how much its harness was given."""
    return place_key(conversation.chain[-1]), aborted_key(conversation.voice)


def wanted(conversation: Conversation, last: int | None = None, handles: Mapping[int, str] = MappingProxyType({})) -> list[bytes]:
    """The keys to look up for a history, the deepest first; the first `c` key that is known ends the search.

    `last` takes those of so many of its last replies only: nearly always the very last one is known. The `p` key stands
    first: it is known where a harness has left, and then the reply may be a beginning as well as a whole. No key is named twice, though
    two replies may have one: equal words, or equal ids of calls.
    """
    keys: dict[bytes, None] = {}
    for i in islice(conversation.replies(), last):
        names = (call_key(conversation, i), handle_key(handles.get(i, ""), conversation.salt))
        places = (place_key(conversation.chain[i]), chain_key(conversation.chain[i + 1]))
        keys |= dict.fromkeys((*places, reply_key(conversation.digests[i], conversation.voice), *filter(None, names)))
    return list(keys)

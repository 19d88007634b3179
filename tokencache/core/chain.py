"""Hashes conversations as chains of digests, and makes the keys under which recorded replies are looked up.

`chain[i]` covers the first `i` messages and the *prompt context*: everything else that shapes the prompt (model, tools, template
arguments). So one look-up of 16 bytes shows whether a history continues a turn. If any earlier message was edited, the turn is not found
under this key. The cost is one short hash per message.

The link of an assistant message is its `messages.digest`, which is equal for all variants of one reply. The link of any other message is
its `messages.exact_digest`, because a template may show any difference. This module does not know which assistant messages are replies of
the model. So a second chain, `written_chain`, covers what their digests leave out (`core.evidence`). The link of a tool result also covers
which call of the preceding reply it answers.

The prompt context is hashed with the deployment's secret. A client without the secret cannot compute the keys of a conversation, and cannot
search for two conversations with the same key. So the later links may use a fast hash, xxh3-128 (docs/decisions/0019).

A key only finds candidates; `core.verdict` then compares them field by field. A reply that the harness received completely has up to four
keys, and a `p` key if it has calls, or if the harness may add words to it; an interrupted reply has two:

======  =====================  ====================================================================================================
prefix  hash of                finds the reply
======  =====================  ====================================================================================================
`c`     the chain through it   if nothing before it changed: nearly always, at the first look-up
`r`     its digest             anywhere in a history, under the same model
`i`     its first call's id    anywhere, even if its text was rewritten; only the letters and digits of the id count
`h`     the call's handle      anywhere under the same model, in dialects that have handles
`p`     the chain before it    in its position, if the harness may send back something else: only its beginning, because it disconnected;
                               the reply with words of its own (`core.added_text`); or other calls than it was served
`a`     the model              anywhere, if it was interrupted: no other reply must be mistaken for its beginning
`q`     the whole request      for a repeated request (`proxy.dedup`)
======  =====================  ====================================================================================================

Only the keys made from the chain depend on the template arguments. Suppose two replies have the same text, one sampled with thinking and
one without: both must be found, otherwise the wrong one would look certain. If the session's rules change texts in a known way, the reply
also has the `c` and `r` keys of its expected forms (`rules.expected_rewritings`). So it has those of its text with the stop string that
ended it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec
import xxhash

from tokencache.core.messages import Message, ToolCall, context_digest, digest, exact_digest
from tokencache.core.rules import STRICT, Leniency, expected_rewritings
from tokencache.core.verdict import bare_id

FIRST_CALL, FIRST_MEDIA, FIRST_ANSWER = "calls", "media", "answer"
"""The keys in `Conversation.first_places` of the first message with a call, of the first with an image or another medium, and of the first
assistant message after a user's."""


class Conversation(msgspec.Struct, frozen=True):
    """A history in canonical form.

    Attributes:
        messages: the messages.
        digests: of each assistant message `messages.digest`, of each other message `messages.context_digest`.
        exacts: `messages.exact_digest` of each message.
        chain: `chain[i]` covers `messages[:i]`; one entry more than `messages`.
        written_chain: `written_chain[i]` covers the assistant messages among `messages[:i]`, exactly as the harness wrote them.
        model_key: a hash of the model's name.
        salt: 16 bytes, for keyed hashes of messages (`evidence`).
        first_places: role → place of its first message; `FIRST_CALL`, `FIRST_MEDIA` and `FIRST_ANSWER` → places of other messages.
        call_count: the number of calls in the messages.
        replies: the places of the assistant messages, in order.
        system_count: the number of system messages at the beginning.
    """

    messages: tuple[Message, ...]
    digests: tuple[bytes, ...]
    exacts: tuple[bytes, ...]
    chain: tuple[bytes, ...]
    written_chain: tuple[bytes, ...]
    model_key: bytes = b""
    salt: bytes = b""
    first_places: dict[str, int] = {}
    call_count: int = 0
    replies: tuple[int, ...] = ()
    system_count: int = 0

    @property
    def sampling_context(self) -> bytes:
        """The key of the prompt context with the system messages at the beginning (16 bytes)."""
        return self.chain[self.system_count]


def build_conversation(
    prompt_context: bytes,
    messages: Sequence[Message],
    digests: Sequence[bytes] | None = None,
    exacts: Sequence[bytes] | None = None,
    *,
    model: bytes = b"",
    secret: bytes = b"",
) -> Conversation:
    """Build a conversation.

    Args:
        prompt_context: an encoding of everything except the messages that shapes the prompt.
        messages: the messages.
        digests: `Conversation.digests`, if the caller has them.
        exacts: `messages.exact_digest` of each message, if the caller has them.
        model: the model's name.
        secret: the deployment's secret, at most 64 bytes.
    """
    start = Conversation(
        messages=(),
        digests=(),
        exacts=(),
        chain=(keyed_hash(secret, b"scope" + prompt_context),),
        written_chain=(keyed_hash(secret, b"written"),),
        model_key=keyed_hash(secret, b"voice" + model),
        salt=keyed_hash(secret, b"salt"),
    )
    digests = digests if digests is not None else [digest(m) if m.role == "assistant" else context_digest(m) for m in messages]
    return extend(start, messages, digests, exacts if exacts is not None else [exact_digest(m) for m in messages])


def extend(known: Conversation, messages: Sequence[Message], digests: Sequence[bytes], exacts: Sequence[bytes]) -> Conversation:
    """Add messages, with their digests, to a conversation; hashes only the new ones."""
    chain, written_chain = list(known.chain), list(known.written_chain)
    calls = known.messages[known.replies[-1]].calls if known.replies else ()
    answered = _places(calls) if calls else {}
    first_places, replies = dict(known.first_places), list(known.replies)
    call_count, system_count = known.call_count, known.system_count
    for place, (message, own, exact) in enumerate(zip(messages, digests, exacts, strict=True), len(known.messages)):
        first_places.setdefault(message.role, place)
        call_count += len(message.calls)
        system_count += message.role == "system" and system_count == place
        if message.media:
            first_places.setdefault(FIRST_MEDIA, place)
        if message.role == "assistant":
            replies.append(place)
            if message.calls:
                first_places.setdefault(FIRST_CALL, place)
            if "user" in first_places:
                first_places.setdefault(FIRST_ANSWER, place)
            answered = _places(message.calls) if message.calls else {}
            chain.append(xxhash.xxh3_128_digest(chain[-1] + own))
            written_chain.append(xxhash.xxh3_128_digest(written_chain[-1] + exact))
        else:
            link = exact + _answered_call(message, answered) if message.role == "tool" else exact
            chain.append(xxhash.xxh3_128_digest(chain[-1] + link))
            written_chain.append(written_chain[-1])
    return Conversation(
        messages=(*known.messages, *messages),
        digests=(*known.digests, *digests),
        exacts=(*known.exacts, *exacts),
        chain=tuple(chain),
        written_chain=tuple(written_chain),
        model_key=known.model_key,
        salt=known.salt,
        first_places=first_places,
        call_count=call_count,
        replies=tuple(replies),
        system_count=system_count,
    )


def before_last(known: Conversation) -> Conversation:
    """Return a conversation without its last message."""
    last = len(known.messages) - 1
    return Conversation(
        messages=known.messages[:last],
        digests=known.digests[:last],
        exacts=known.exacts[:last],
        chain=known.chain[:-1],
        written_chain=known.written_chain[:-1],
        model_key=known.model_key,
        salt=known.salt,
        first_places={name: place for name, place in known.first_places.items() if place < last},
        call_count=known.call_count - len(known.messages[last].calls),
        replies=tuple(place for place in known.replies if place < last),
        system_count=min(known.system_count, last),
    )


def keyed_hash(secret: bytes, data: bytes) -> bytes:
    """Hash with a secret: BLAKE2b (RFC 7693), 16 bytes. A client without the secret cannot compute it or find a collision."""
    return hashlib.blake2b(data, digest_size=16, key=secret).digest()


def _places(calls: Sequence[ToolCall]) -> dict[str, int]:
    """Map the ids of a reply's calls to their numbers, an id that is there twice to the first."""
    return {call.id: n for n, call in reversed([*enumerate(calls)])}


def _answered_call(result: Message, calls: Mapping[str, int]) -> bytes:
    """Say which call a tool's result answers; `calls` are those of the last assistant message before it (`_places`)."""
    name = result.answers or ""
    return b"call:%d" % calls[name] if name in calls else b"id:" + name.encode("utf-8", "surrogatepass")


# Look-up keys: one byte for the kind (the table above), and a hash of 16 bytes.

CHAIN_KEY, POSITION_KEY, REQUEST_KEY = b"c", b"p", b"q"
"""Kinds of keys. After the first two follows the chain of the messages up to the reply, or of those before it; after the third, the request
fingerprint."""


def reply_key(digest: bytes, model_key: bytes) -> bytes:
    """Return the key of a reply of a model, whatever its context."""
    return b"r" + xxhash.xxh3_128_digest(model_key + digest)


def aborted_key(model_key: bytes) -> bytes:
    """Return the key of all interrupted replies of a model."""
    return b"a" + xxhash.xxh3_128_digest(model_key)


def call_key(conversation: Conversation, i: int) -> bytes:
    """Return the key of the id of the first call of `messages[i]`; `b""` if it has none."""
    message = conversation.messages[i]
    return _call_key(message, conversation.model_key) if message.calls else b""


def _call_key(message: Message, model_key: bytes) -> bytes:
    name = bare_id(message.calls[0].id) if message.calls else ""
    return b"i" + xxhash.xxh3_128_digest(model_key + name.encode()) if name else b""


def handle_key(handle: str, model_key: bytes) -> bytes:
    """Return the key of a handle of a model's reply, `b""` if there is none."""
    return b"h" + xxhash.xxh3_128_digest(model_key + handle.encode("utf-8", "surrogatepass")) if handle else b""


def turn_keys(
    conversation: Conversation,
    served: Message,
    own: bytes,
    *,
    handle: str = "",
    leniency: Leniency = STRICT,
    restored: Message | None = None,
) -> tuple[bytes, ...]:
    """Return the keys of a reply to `conversation` that the harness received completely.

    `own` is the digest of `served`. `restored` is the reply with its stop string (`added_text.with_stop_string`).
    """
    before, model = conversation.chain[-1], conversation.model_key
    chains, replies = {CHAIN_KEY + xxhash.xxh3_128_digest(before + own): None}, {reply_key(own, model): None}
    for other in (*expected_rewritings(served, leniency), *([restored] if restored is not None else [])):
        form = digest(other)
        chains[CHAIN_KEY + xxhash.xxh3_128_digest(before + form)] = replies[reply_key(form, model)] = None
    names = [handle_key(handle, model)] if handle else []
    if served.calls:
        names = [*filter(None, (_call_key(served, model),)), *names, POSITION_KEY + before]
    return (*chains, *replies, *names)


def aborted_turn_keys(conversation: Conversation) -> tuple[bytes, ...]:
    """Return the keys of an interrupted reply to `conversation`; the harness received an unknown part of it."""
    return POSITION_KEY + conversation.chain[-1], aborted_key(conversation.model_key)


def lookup_keys(conversation: Conversation, last: int | None = None, handles: Mapping[int, str] = MappingProxyType({})) -> list[bytes]:
    """Return the keys to look up for a history, without duplicates, the deepest reply first.

    The first known `c` key ends the search. The `p` key of the same place precedes it, because that reply may be a whole reply or only the
    beginning of an interrupted one. `last` limits the keys to that many of the last replies: the very last one is nearly always known.
    `handles` maps places to handles.
    """
    keys: dict[bytes, None] = {}
    for i in reversed(conversation.replies[-last:] if last is not None else conversation.replies):
        keys[POSITION_KEY + conversation.chain[i]] = None
        keys[CHAIN_KEY + conversation.chain[i + 1]] = None
        keys[reply_key(conversation.digests[i], conversation.model_key)] = None
        if conversation.messages[i].calls and (name := call_key(conversation, i)):
            keys[name] = None
        if handle := handles.get(i, ""):
            keys[handle_key(handle, conversation.model_key)] = None
    return list(keys)

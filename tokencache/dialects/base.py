"""Defines what a dialect provides: routes, credential headers, error shape, request parser and reply encoder.

vLLM returns token ids only for chat completions. So a dialect translates each request into a chat request, and the chat
reply back into its own format, event by event while it streams:

    request ──parse──▶ ModelCall(chat body, encoder) ──▶ engine ──▶ chat chunks ──ReplyEncoder──▶ the dialect's events

A dialect does no I/O. What it has to look up (served models, documents it stored) comes from functions in `DialectRequest`.

Handles: in some dialects the client must echo an opaque value (`signature`, `encrypted_content`, item ids). The dialect puts the
call's `handle` there, 32 random hexadecimal digits. `ModelCall.handles` reports which assistant messages the client sent back with
a handle. A handle is looked up only within its session. It selects the turn to compare with and proves nothing: the message is
still compared field by field.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tokencache.dialects.gym import ReturnedIdFragments

AUTHORIZATION = "Authorization"
"""The credential header of OpenAI's clients: `Bearer <key>`."""
EVENT_STREAM = "text/event-stream"
HANDLE = re.compile(r"[0-9a-f]{32}")


class ServedModel(msgspec.Struct, frozen=True):
    """A model that the engine serves; `max_model_len` in tokens, 0 if unknown."""

    name: str
    max_model_len: int = 0


class DialectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a session: the input of a dialect.

    Attributes:
        method: in upper case.
        path: without the query, percent-encoded as received, with a leading `/`.
        query: parameters of the query; the last value of each name.
        headers: case-insensitive.
        body: the whole body.
        handle: the handle for this call's reply, 32 hexadecimal digits.
        token_ids: whether replies carry token ids the way NeMo Gym's do (`gym`).
        served: lists the models that the engine serves.
        documents: reads documents of this session that a dialect stored (`ReplyEncoder.documents`), all in one round trip; `None`
            for each that does not exist.
        forget: deletes such a document; false if it did not exist.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    handle: str
    served: Callable[[], Awaitable[list[ServedModel]]]
    documents: Callable[[Sequence[str]], Awaitable[list[bytes | None]]]
    forget: Callable[[str], Awaitable[bool]]
    token_ids: bool = False


class ReplyEncoder(Protocol):
    """Encodes the reply to one call. `chunk` is called once for each chunk, in order. Subclass it to get the defaults."""

    def whole(self, data: bytes) -> bytes:
        """Encode a whole chat completion (JSON) as a response body."""

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """Encode one chat chunk as framed events; `b""` if the client gets nothing for it yet.

        Args:
            event: the bytes that the engine sent.
            data: the chunk's JSON, possibly without the prompt's ids. `{"error": …}` is an engine's error within its stream.
            prompt_tokens: the length of the prompt, 0 while unknown (known from the first chunk on).
        """

    @property
    def chunk_unparsed(self) -> Callable[[bytes], bytes | None] | None:
        """A function that encodes most events without parsing them, or `None` if this reply needs every event parsed.

        It takes an event after the first chunk. It returns what `chunk` would return, which may be `b""`; or `None`, and then the
        event has to go through `chunk`.
        """
        return None

    def rest(self) -> bytes:
        """Return events that `chunk` kept back, if the engine's stream ended without `[DONE]`; none by default."""
        return b""

    def end(self) -> bytes:
        """Encode the end of the stream, after the engine's `[DONE]`."""

    def keep_alive(self) -> bytes:
        """Encode an event without content, to keep a silent connection open; by default a comment, which clients ignore."""
        return b": keep-alive\n\n"

    def error(self, status: int, message: str) -> bytes:
        """Encode an error within a stream that has begun, framed, with everything up to the end of the stream."""

    def documents(self) -> dict[str, bytes]:
        """Documents to store in the session with this reply, by name; none by default. Called after the reply is complete."""
        return {}


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A model call, translated into a chat request.

    Attributes:
        body: the chat request's JSON, with `messages` first, so that a longer history can be parsed incrementally.
        encoder: encodes the reply.
        handles: index of an assistant message in `messages` → the handle that the client sent back with it.
        echoes: index of a message in `messages` → the token ids that the client sent back with it.
        left_out: names of rules of the dialect by which parts of the request were left out (`core.rules`).
        media_type: of a streamed reply.
    """

    body: bytes
    encoder: ReplyEncoder
    handles: Mapping[int, str] = {}
    echoes: Mapping[int, ReturnedIdFragments] = {}
    left_out: tuple[str, ...] = ()
    media_type: str = EVENT_STREAM


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the number of tokens of a prompt: the chat request, and a function that writes the response for a count."""

    body: bytes
    write: Callable[[int], bytes]


class DirectReply(msgspec.Struct, frozen=True, kw_only=True):
    """A response (JSON) that needs no engine."""

    body: bytes
    status: int = 200


ParsedRequest = ModelCall | TokenCount | DirectReply


class Dialect(Protocol):
    """A wire format that clients use.

    Attributes:
        name: recorded with every turn; a label of the metrics.
        credential_headers: headers in which clients send an API key.
        credential_parameters: query parameters in which they may send it.
    """

    name: str
    credential_headers: tuple[str, ...] = (AUTHORIZATION,)
    credential_parameters: tuple[str, ...] = ()

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        """Write the body of an error response; `kind` is OpenAI's `type`, which the dialect maps to its own."""


class TranslatedDialect(Dialect, Protocol):
    """A dialect whose requests become chat requests."""

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request is in this dialect; `path` without its query."""

    async def parse(self, request: DialectRequest) -> ParsedRequest:
        """Parse a request.

        Raises:
            HarnessError: the request cannot be served; the message names the member, in the dialect's terms.
            StoreError: a document could not be read.
        """


def parse_engine_error(status: int, body: bytes) -> tuple[str, str, str | None]:
    """Parse an engine's error response, usually in OpenAI's shape: the message, type and `param` for `Dialect.error`.

    A server in front of the engine sends a page of HTML. It is not used as the message, because it may name addresses.
    """
    try:
        found = msgspec.json.decode(body)
        error = found.get("error", found)
        message, kind, param = error.get("message"), error.get("type"), error.get("param")
    except (ValueError, AttributeError, RecursionError):
        message, kind, param = None, None, None
    if not isinstance(message, str):
        text = body[:500].decode(errors="replace").strip()
        message = text if text and not text.startswith("<") else f"the engine, or a server before it, answered {status} without a message"
    return message, kind if isinstance(kind, str) else "upstream_error", param if isinstance(param, str) else None

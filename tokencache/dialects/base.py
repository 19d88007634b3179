"""Defines what a dialect provides: routes, credential headers, error shape, request parser and reply encoder.

vLLM returns token ids only for chat completions. So a dialect translates each request into a chat request, and the chat
reply back into its own format, event by event while it streams:

    request ──parse──▶ ParsedCall ──read──▶ ChatCall ──▶ engine ──▶ chat chunks ──ReplyEncoder──▶ the dialect's events

Chat and text completions are dialects, too, but nothing is translated (`untranslated`).

A dialect does no I/O. What it has to look up (served models, documents it stored) comes from functions in `DialectRequest`.

Handles: in some dialects the client must echo an opaque value (`signature`, `encrypted_content`, item ids). The dialect puts the
call's `handle` there, 32 random hexadecimal digits. `ModelCall.handles` reports which assistant messages the client sent back with
a handle. A handle is looked up only within its session. It selects the turn to compare with and proves nothing: the message is
still compared field by field.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote

import msgspec

from tokencache.dialects import gym_request
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.reply import WrittenReply, write_completion
from tokencache.dialects.chat.request import ChatCall, read_chat
from tokencache.dialects.chat.routes import CHAT
from tokencache.dialects.chat.sampling import is_search
from tokencache.dialects.gym import ReturnedIdFragments, prefix_of
from tokencache.dialects.reply_encoder import EVENT_STREAM, ReplyEncoder
from tokencache.errors import HarnessError

AUTHORIZATION = "Authorization"
"""The credential header of OpenAI's clients: `Bearer <key>`."""
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

    async def find_model(self, name: str) -> ServedModel | None:
        """Find a model by a name that may be percent-encoded; `None` if the engine does not serve it."""
        name = unquote(name)
        return next((model for model in await self.served() if model.name == name), None)


class CallReader(msgspec.Struct, frozen=True):
    """What is needed to read the calls of one session in one dialect.

    Attributes:
        parser: remembers parsed bodies.
        known_as: its key of the earlier body that this one may continue; `""` if none is remembered.
        served: maps the client's model name to a served model.
    """

    parser: IncrementalParser
    known_as: str
    served: Callable[[str], str] = str


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A model call, as its dialect parsed it.

    Attributes:
        body: the JSON that `read` reads: the client's own, or a chat request.
        media_type: of a streamed reply.
        reminds: whether system messages after the first one become reminders for a template that refuses them.
    """

    body: bytes
    media_type: str = EVENT_STREAM
    reminds: bool = False

    async def read(self, request: DialectRequest, body: bytes, reader: CallReader) -> ChatCall:
        """Read the call. `body` is `self.body`, maybe with fetched images or other messages.

        Raises:
            HarnessError: a member cannot be read.
        """
        raise NotImplementedError

    def reply_encoder(self, call: ChatCall) -> ReplyEncoder:
        """Return what encodes the reply to a call that `read` returned."""
        raise NotImplementedError

    def unrecorded(self, call: ChatCall) -> str:
        """Describe a call that is only relayed, because its reply cannot be recorded truthfully; `""` for all others.

        Raises:
            HarnessError: it cannot be relayed either.
        """
        raise NotImplementedError

    def engine_body(self, call: ChatCall) -> bytes:
        """Write the request for the engine; `b""` if the engine's driver writes it."""
        raise NotImplementedError

    def address(self, path: str, headers: MutableMapping[str, str], credential_headers: Sequence[str]) -> str:
        """Return path and query of the engine's route, from the client's, and change the client's headers for the engine in place.

        `headers` are case-insensitive. In `credential_headers` clients of any dialect send an API key.
        """
        raise NotImplementedError


class ModelCall(ParsedCall, frozen=True, kw_only=True):
    """A model call, translated into a chat request.

    Attributes:
        body: the chat request's JSON, with `messages` first, so that a longer history can be parsed incrementally.
        encoder: encodes the reply.
        handles: index of an assistant message in `messages` → the handle that the client sent back with it.
        echoes: index of a message in `messages` → the token ids that the client sent back with it.
        left_out: names of rules of the dialect by which parts of the request were left out (`core.rules`).
    """

    encoder: ReplyEncoder
    handles: Mapping[int, str] = {}
    echoes: Mapping[int, ReturnedIdFragments] = {}
    left_out: tuple[str, ...] = ()
    reminds: bool = True

    async def read(self, request: DialectRequest, body: bytes, reader: CallReader) -> ChatCall:
        """See `ParsedCall.read`."""
        call = await read_translated(request, body, reader)
        call.handle, call.handles, call.echoes, call.left_out = request.handle, self.handles, self.echoes, self.left_out
        call.required_prefix = prefix_of(request.body)
        return call

    def reply_encoder(self, call: ChatCall) -> ReplyEncoder:
        """See `ParsedCall.reply_encoder`."""
        del call
        return self.encoder

    def unrecorded(self, call: ChatCall) -> str:
        """See `ParsedCall.unrecorded`."""
        if is_search(call.fields):
            raise HarnessError("'use_beam_search' is not supported here: its reply cannot be recorded", param="use_beam_search")
        return ""

    def engine_body(self, call: ChatCall) -> bytes:
        """See `ParsedCall.engine_body`."""
        del call
        return b""

    def address(self, path: str, headers: MutableMapping[str, str], credential_headers: Sequence[str]) -> str:
        """See `ParsedCall.address`: the engine gets a chat request. It reads an API key in `Authorization`."""
        del path
        keys = [headers.pop(name) for name in credential_headers if name != AUTHORIZATION and name in headers]
        if keys:
            headers.setdefault(AUTHORIZATION, f"Bearer {keys[0]}")
        headers["Content-Type"] = "application/json"
        return CHAT


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the number of tokens of a prompt: the chat request, and a function that writes the response for a count."""

    body: bytes
    write: Callable[[int], bytes]
    reminds: bool = True

    async def read(self, request: DialectRequest, body: bytes, reader: CallReader) -> ChatCall:
        """See `ParsedCall.read`."""
        return await read_translated(request, body, reader)


async def read_translated(request: DialectRequest, body: bytes, reader: CallReader) -> ChatCall:
    """Read a chat request that a dialect has written; arguments and errors as `ParsedCall.read`."""
    rewrite = gym_request.translated_members if request.token_ids else None
    return await read_chat(body, reader.parser, reader.known_as, served=reader.served, rewrite=rewrite)


class DirectReply(msgspec.Struct, frozen=True, kw_only=True):
    """A response (JSON) that needs no engine."""

    body: bytes
    status: int = HTTPStatus.OK


ParsedRequest = ParsedCall | TokenCount | DirectReply


class Dialect(Protocol):
    """A wire format that clients use.

    Attributes:
        name: recorded with every turn; a label of the metrics.
        credential_headers: headers in which clients send an API key.
        credential_parameters: query parameters in which they may send it.
        carries_ids: whether the messages of its replies can carry token ids (`gym`).
    """

    name: str
    credential_headers: tuple[str, ...] = (AUTHORIZATION,)
    credential_parameters: tuple[str, ...] = ()
    carries_ids: bool = True

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request is in this dialect; `path` without its query."""

    async def parse(self, request: DialectRequest) -> ParsedRequest:
        """Parse a request.

        Raises:
            HarnessError: the request cannot be served; the message names the member, in the dialect's terms.
            StoreError: a document could not be read.
        """

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        """Write the body of an error response; `kind` is OpenAI's `type`, which the dialect maps to its own."""

    def engine_error(self, status: int, body: bytes) -> bytes:
        """Write the body of a response for an engine's error (HTTP status and body)."""

    def completion(self, reply: WrittenReply) -> bytes:
        """Write a reply that the proxy makes itself, in the format that the dialect's `ReplyEncoder` reads."""
        return write_completion(reply)


class TranslatedDialect(Dialect, Protocol):
    """A dialect whose requests become chat requests."""

    def engine_error(self, status: int, body: bytes) -> bytes:
        """See `Dialect.engine_error`."""
        return self.error(status, *parse_engine_error(status, body))


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

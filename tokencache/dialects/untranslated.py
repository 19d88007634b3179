"""The dialects whose clients get the engine's own bytes: chat completions and text completions.

Members of a request stay raw JSON (`chat.request`, `text_completions`). Every other dialect is translated into chat completions. Text
completions are recorded, but never spliced.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Protocol

import msgspec

from tokencache.dialects import gym_request, text_completions
from tokencache.dialects.base import CallReader, Dialect, DialectRequest, ParsedCall, ParsedRequest, parse_engine_error
from tokencache.dialects.chat.reply import ChatReplyEncoder, WrittenReply
from tokencache.dialects.chat.request import ChatCall, read_chat
from tokencache.dialects.chat.routes import CHAT, COMPLETIONS
from tokencache.dialects.chat.sampling import BEAM_SEARCH, is_search
from tokencache.dialects.reply_encoder import ReplyEncoder


class UntranslatedDialect(Dialect, Protocol):
    """A dialect in the engine's own format."""

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        """Write OpenAI's error body as vLLM does; see `Dialect.error`."""
        return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})

    def engine_error(self, status: int, body: bytes) -> bytes:
        """See `Dialect.engine_error`: the engine's own, unless it is a gateway's page of HTML."""
        return self.error(status, *parse_engine_error(status, body)) if body.lstrip()[:1] == b"<" else body


class _UntranslatedCall(ParsedCall, frozen=True, kw_only=True):
    """A call in the engine's own format."""

    def engine_body(self, call: ChatCall) -> bytes:
        """See `ParsedCall.engine_body`."""
        del call
        return b""

    def address(self, path: str, headers: MutableMapping[str, str], credential_headers: Sequence[str]) -> str:
        """See `ParsedCall.address`."""
        del headers, credential_headers
        return path


class _ChatRequest(_UntranslatedCall, frozen=True, kw_only=True):
    """A call in chat completions."""

    async def read(self, request: DialectRequest, body: bytes, reader: CallReader) -> ChatCall:
        """See `ParsedCall.read`."""
        rewrite = gym_request.chat_members if request.token_ids else None
        return await read_chat(body, reader.parser, reader.known_as, served=reader.served, rewrite=rewrite)

    def reply_encoder(self, call: ChatCall) -> ReplyEncoder:
        """See `ParsedCall.reply_encoder`."""
        return ChatReplyEncoder(call)

    def unrecorded(self, call: ChatCall) -> str:
        """See `ParsedCall.unrecorded`."""
        return f"a chat completion with {BEAM_SEARCH}" if is_search(call.fields) else ""


class ChatDialect(UntranslatedDialect):
    """OpenAI chat completions, as vLLM 0.32 serves them."""

    name = "chat"

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """See `Dialect.matches`."""
        del headers
        return path == CHAT and method == "POST"

    async def parse(self, request: DialectRequest) -> ParsedRequest:
        """See `Dialect.parse`; the whole request is parsed when it is read."""
        return _ChatRequest(body=request.body)


class _TextRequest(_UntranslatedCall, frozen=True, kw_only=True):
    """A call in text completions."""

    async def read(self, request: DialectRequest, body: bytes, reader: CallReader) -> ChatCall:
        """See `ParsedCall.read`."""
        del request
        return text_completions.read(body, served=reader.served)

    def reply_encoder(self, call: ChatCall) -> ReplyEncoder:
        """See `ParsedCall.reply_encoder`."""
        return text_completions.TextReplyEncoder(call)

    def unrecorded(self, call: ChatCall) -> str:
        """See `ParsedCall.unrecorded`."""
        why = text_completions.unrecorded(call.fields)
        return f"a text completion with {why}" if why else ""

    def engine_body(self, call: ChatCall) -> bytes:
        """See `ParsedCall.engine_body`."""
        return text_completions.for_engine(call)


class TextDialect(UntranslatedDialect):
    """OpenAI's text completions, as vLLM 0.32 serves them."""

    name = "completions"
    carries_ids = False

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """See `Dialect.matches`."""
        del headers
        return path == COMPLETIONS and method == "POST"

    async def parse(self, request: DialectRequest) -> ParsedRequest:
        """See `Dialect.parse`."""
        return _TextRequest(body=request.body)

    def completion(self, reply: WrittenReply) -> bytes:
        """See `Dialect.completion`."""
        return text_completions.write_completion(reply)

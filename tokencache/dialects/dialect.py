"""Dialects: what a codec is.

vLLM returns token ids on chat completions only, so whatever a harness speaks is turned into a chat request, and the
chat reply is said again in the harness's words, event by event as it comes:

    request ──read──▶ Spoken(chat body, Speaker)  ──▶ plan, send ──▶ chat chunks ──Speaker──▶ the dialect's events

A codec is pure: it gets what was asked (`DialectRequest`) and answers with what is to be done. It imports no I/O; what it must
look up (models served, documents it kept) it asks for through the functions that `DialectRequest` brings.

Handles: where a dialect makes the harness echo something opaque (`signature`, `encrypted_content`, ids of items), the
codec puts the call's `handle` there, 32 hexadecimal digits that nobody can guess, and reports in `Spoken.handles` which
assistant messages came back with one. A handle is looked up within its session only, and it is evidence where to look,
never a proof: what came back with it is judged field by field.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tokencache.dialects.gym import ReturnedIdFragments

EVENTS = "text/event-stream"
HANDLE = re.compile(r"[0-9a-f]{32}")
"""A handle of ours, as it stands in an opaque member."""


class ServedModel(msgspec.Struct, frozen=True):
    """A model that the engine serves; `max_model_len` in tokens, 0 if unknown."""

    name: str
    max_model_len: int = 0


class DialectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request within a session, as a codec sees it.

    Attributes:
        method: upper case.
        path: without the query, percent-encoding as received, beginning with `/`.
        query: the query's members (the last of each name).
        headers: case-insensitive.
        body: the whole body.
        handle: the handle to give out with this call's reply: 32 hexadecimal digits.
        token_ids: whether replies carry token ids, as NeMo Gym's do (`gym`).
        served: lists the models that the engine serves.
        documents: reads documents that a codec kept in this session (`Speaker.documents`), all in one round trip; `None`
            where there is none.
        forget: drops such a document; false if there was none.
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


class Speaker(Protocol):
    """Says one call's reply. Made for one call; `chunk` is called for every chunk in order."""

    def body(self, data: bytes) -> bytes:
        """Say a whole chat completion (JSON), as the body of the answer."""

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """Say one chat chunk: the events for it, framed; `b""` if there is nothing to say yet.

        `event` are the bytes that came, `data` the chunk's JSON, perhaps without the echo of the prompt's ids;
        `prompt_tokens` is how many the prompt has, 0 while unknown (it is known with the first chunk). An engine's error
        within its stream is such a chunk (`{"error": …}`).
        """

    @property
    def unread(self) -> Callable[[bytes], bytes | None] | None:
        """What says most events without reading them; `None` if every event must be read.

        It takes an event as it came, behind the first chunk. It returns what `chunk` would have (`b""` too: then nothing is to be
        said of it), and the event needs no `chunk` any more; or `None`, and the event must be read after all.
        """

    def end(self) -> bytes:
        """What follows when the engine has said `[DONE]`: everything up to the end of the stream."""

    def keep_alive(self) -> bytes:
        """An event that says nothing, for times of silence."""

    def failed(self, status: int, message: str) -> bytes:
        """An error within a stream that has begun, framed; nothing but the end of the stream follows it."""

    def documents(self) -> dict[str, bytes]:
        """What is to be kept in the session with this reply, by name; asked for once the reply is whole."""


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """A model call, in chat.

    Attributes:
        body: the chat request's JSON, `messages` first: a history that grows is then read from where the last one ended.
        speaker: says the reply.
        handles: places in `messages` (assistant's) → the handle that came back with that message.
        echoes: places in `messages` → the token ids that came back with that message.
        left_out: names of the dialect-level rules by which something of the request was left out (`core.rules`).
        media_type: what a streamed reply is.
    """

    body: bytes
    speaker: Speaker
    handles: Mapping[int, str] = {}
    echoes: Mapping[int, ReturnedIdFragments] = {}
    left_out: tuple[str, ...] = ()
    media_type: str = EVENTS


class Counting(msgspec.Struct, frozen=True, kw_only=True):
    """A question how many tokens a request has: its chat request, and how the count (tokens) is said."""

    body: bytes
    say: Callable[[int], bytes]


class DirectReply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that needs no engine: JSON."""

    body: bytes
    status: int = 200


Meaning = Spoken | Counting | DirectReply


class Dialect(Protocol):
    """A codec. `name` is recorded with every turn and labels the metrics."""

    name: str

    def speaks(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request is this dialect's to read."""

    async def read(self, asked: DialectRequest) -> Meaning:
        """Read a request.

        Raises:
            HarnessError: it cannot be served; the message names what is wrong, in the dialect's terms.
            StoreError: a document could not be read.
        """

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        """Write an error's body; `kind` is OpenAI's `type`, to be said in the dialect's vocabulary."""


def refusal(status: int, body: bytes) -> tuple[str, str, str | None]:
    """Take an engine's refusal (OpenAI's shape, or whatever it sent) apart: message, type and `param`, as `Dialect.error` wants them."""
    try:
        found = msgspec.json.decode(body)
        error = found.get("error", found)
        message, kind, param = error.get("message"), error.get("type"), error.get("param")
    except (ValueError, AttributeError, RecursionError):
        message, kind, param = None, None, None
    if not isinstance(message, str):
        message = body[:500].decode(errors="replace") or f"the engine answered {status}"
    return message, kind if isinstance(kind, str) else "upstream_error", param if isinstance(param, str) else None

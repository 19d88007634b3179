"""The Responses dialect: its routes and credential header, and the parser of whole requests (as openai 3.52, otherwise as vLLM 0.32).

=======================================  =====================================================================================
`POST /v1/responses`                     a model call, streaming or not
`POST /v1/responses/input_tokens`        the number of tokens of the same request
`GET /v1/responses/<id>`                 a stored response (`stored`), as for the next two
`GET /v1/responses/<id>/input_items`     with everything before it that `previous_response_id` added
`DELETE /v1/responses/<id>`
`GET /v1/responses`                      a WebSocket (`server.responses_socket`). A wrong handshake gets 426, after which Codex 0.169 uses
                                         HTTP at once. It repeats other errors
=======================================  =====================================================================================

`previous_response_id` does not use the engine's store. The history is the whole input and output of that response (vLLM's store returns
only texts), without its `instructions`, as in OpenAI's API. Handles are in the ids of output items, and in `encrypted_content` if the
client requested it (`include`).
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from tokencache.dialects import gym_request, json_io
from tokencache.dialects.base import DialectRequest, ModelCall, ParsedRequest, TokenCount, TranslatedDialect
from tokencache.dialects.json_io import member
from tokencache.dialects.responses.reply import ResponsesReplyEncoder
from tokencache.dialects.responses.request import (
    SEALED,
    ItemMessages,
    chat_request,
    continues,
    items_of,
    members_of,
    members_shown,
    refuse_unsupported,
)
from tokencache.dialects.responses.stored import Library, answer_stored, kept
from tokencache.dialects.responses.vocabulary import NO_PREVIOUS, Item, Offer, ToolSelection, choose, error_members, read_tools
from tokencache.errors import HarnessError
from tokencache.pauses import MESSAGES, pause

Raw = msgspec.Raw

_ROOT = "/v1/responses"
_RENDER = f"{_ROOT}/render"
Keep = Callable[[dict[str, Any]], dict[str, bytes]]
_ID = re.compile(r"resp_([0-9a-f]{32})")


class _Request(msgspec.Struct):
    """A parsed request.

    Attributes:
        fields: its members, raw.
        shown: members that the response repeats.
        items: new items, with references replaced. `sent`: their bytes as they arrived.
        translated: the chat messages.
        previous: the handle of the response that it continues, or `""`.
        gym: whether the chat request follows NeMo Gym (`gym_request`).
    """

    fields: dict[str, Raw]
    shown: dict[str, Any]
    items: list[Item]
    sent: list[bytes]
    translated: ItemMessages
    offer: Offer
    choice: ToolSelection
    previous: str
    gym: bool

    def body(self) -> bytes:
        """Write its chat request."""
        last = bool(self.items) and continues(self.items[-1][1]) and not self.gym
        return chat_request(self.fields, self.shown, self.translated.messages, self.choice, continues=last, gym=self.gym)


class ResponsesDialect(TranslatedDialect):
    """OpenAI's Responses API, as openai 3.52 and Codex 0.169 use it."""

    name = "responses"

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """See `Dialect.matches`: everything under `/v1/responses` except vLLM's rendering, which samples nothing."""
        del method, headers
        return path == _ROOT or (path.startswith(f"{_ROOT}/") and path != _RENDER)

    async def parse(self, request: DialectRequest) -> ParsedRequest:
        """See `Dialect.parse`."""
        if request.path == _ROOT and request.method == "POST":
            return await _call(request)
        if request.path == f"{_ROOT}/input_tokens" and request.method == "POST":
            return TokenCount(body=(await _read(request)).body(), write=_write_count)
        if request.path == _ROOT and "websocket" in request.headers.get("Upgrade", "").lower():
            message = "this is no handshake of WebSocket 13 (RFC 6455): correct it, or send the request with POST over HTTP"
            raise HarnessError(message, status=HTTPStatus.UPGRADE_REQUIRED, headers={"Upgrade": "HTTP/1.1"})
        return await answer_stored(request, request.path.removeprefix(_ROOT))

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        """See `Dialect.error`."""
        del status
        return json_io.write({"error": error_members(message, kind, param)})


async def _call(request: DialectRequest) -> ModelCall:
    parsed = await _read(request)
    shared = {name: Raw(json_io.write(value)) for name, value in parsed.shown.items()}
    previous = f"resp_{parsed.previous}" if parsed.previous else None
    keep: Keep = _nothing
    if parsed.shown["store"]:
        library = Library(request.documents)
        context = (
            await library.answered(parsed.items, parsed.previous) if parsed.previous else await library.continued(parsed.items, parsed.sent)
        )
        keep = partial(kept, request.handle, context, shared)
    encoder = ResponsesReplyEncoder(
        request.handle,
        model=member(parsed.fields, "model", (str,), ""),
        members={**shared, "previous_response_id": previous},
        names=parsed.offer.names,
        thoughts=member(parsed.fields, "include_reasoning", (bool,), True),
        sealed=SEALED in member(parsed.fields, "include", (list,), []),
        as_gym=request.token_ids,
        keep=keep,
    )
    translated = parsed.translated
    return ModelCall(
        body=parsed.body(),
        encoder=encoder,
        handles=translated.handles,
        echoes=translated.echoes,
        left_out=tuple(sorted(translated.left_out)),
    )


async def _read(request: DialectRequest) -> _Request:
    fields = members_of(request.body)
    if request.token_ids:
        fields = gym_request.responses_members(fields)
    refuse_unsupported(fields)
    shown = members_shown(fields)
    instructions = member(fields, "instructions", (str,), None)
    handle, history = await _previous(request, fields)
    new, echoes = items_of(fields, needed=not handle, kept=shown["store"])
    items = await Library(request.documents).referred(new)
    translated = ItemMessages()
    system, joined = instructions, 0
    if request.token_ids and not history:
        stream = member(fields, "stream", (bool,), False)
        system, joined = gym_request.leading_system(instructions, [item for _, item in items], stream=stream)
    if system:
        translated.messages.append({"role": "system", "content": system})
    for i, (_, item) in enumerate(history):
        if i % MESSAGES == MESSAGES - 1:
            await pause()
        translated.add(item, ("previous", i))
    for i, (_, item) in enumerate(items[joined:], joined):
        if i % MESSAGES == MESSAGES - 1:
            await pause()
        translated.add(item, ("input", i), echoes.get(i))
    translated.close()
    offer = read_tools({"tools": shown["tools"], **translated.tools})
    return _Request(
        fields=fields,
        shown={**shown, "instructions": instructions},
        items=items,
        sent=[raw for raw, _ in new],
        translated=translated,
        offer=offer,
        choice=choose(offer, shown["tool_choice"]),
        previous=handle,
        gym=request.token_ids,
    )


async def _previous(request: DialectRequest, fields: dict[str, Raw]) -> tuple[str, list[Item]]:
    """Find the response that a request continues: its handle, or `""`, and all its items."""
    name = member(fields, "previous_response_id", (str,), None)
    if name is None:
        return "", []
    ours = _ID.fullmatch(name)
    history = await Library(request.documents).history(ours[1], output=True) if ours else None
    if ours is None or history is None:
        raise HarnessError(f"Previous response with id '{name}' not found.", param="previous_response_id", kind=NO_PREVIOUS)
    return ours[1], history


def _write_count(tokens: int) -> bytes:
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})


def _nothing(response: dict[str, Any]) -> dict[str, bytes]:
    del response
    return {}

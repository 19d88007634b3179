"""Responses: OpenAI's API of that name, as a dialect (openai 3.52; what vLLM 0.32 does where OpenAI leaves it open).

=======================================  =====================================================================================
`POST /v1/responses`                     a model call, streaming or not
`POST /v1/responses/input_tokens`        counts the tokens of the same request
`GET /v1/responses/<id>`                 from our own documents, as are the next two (`stored`, `kept`)
`GET /v1/responses/<id>/input_items`     with everything in front of it that `previous_response_id` brought along
`DELETE /v1/responses/<id>`
=======================================  =====================================================================================

`previous_response_id` works whatever the engine keeps: its history is that response's whole input and whole output
(vLLM's own store brings back the texts alone), without its `instructions`, as OpenAI has it. Handles stand in the ids of
output items, and in `encrypted_content` where the harness asked for it (`include`).
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from tokencache.dialects import gym_request, json_io
from tokencache.dialects.base import AUTHORIZATION, DialectRequest, ModelCall, ParsedRequest, TokenCount
from tokencache.dialects.json_io import member
from tokencache.dialects.responses.reply import ResponsesReplyEncoder
from tokencache.dialects.responses.request import (
    SEALED,
    Talk,
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

Raw = msgspec.Raw

_ROOT = "/v1/responses"
_ENGINES_OWN = f"{_ROOT}/render"
Keep = Callable[[dict[str, Any]], dict[str, bytes]]
_ID = re.compile(r"resp_([0-9a-f]{32})")


class _Request(msgspec.Struct):
    """What a request comes to.

    Attributes:
        fields: its members, raw.
        shown: those that the response shows again.
        items: the new ones, references replaced; `sent` are their bytes as they came.
        talk: the chat messages.
        previous: the handle of the response it continues, or `""`.
        gym: whether the chat request is NeMo Gym's (`gym_request`).
    """

    fields: dict[str, Raw]
    shown: dict[str, Any]
    items: list[Item]
    sent: list[bytes]
    talk: Talk
    offer: Offer
    choice: ToolSelection
    previous: str
    gym: bool

    def body(self) -> bytes:
        """Write its chat request."""
        last = bool(self.items) and continues(self.items[-1][1]) and not self.gym
        return chat_request(self.fields, self.shown, self.talk.messages, self.choice, continues=last, gym=self.gym)


class ResponsesDialect:
    """OpenAI's Responses API, as openai 3.52 and Codex 0.169 speak it."""

    name = "responses"
    credential_headers: tuple[str, ...] = (AUTHORIZATION,)
    credential_parameters: tuple[str, ...] = ()

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """Everything under `/v1/responses`, but for vLLM's rendering, which samples nothing."""
        del method, headers
        return path == _ROOT or (path.startswith(f"{_ROOT}/") and path != _ENGINES_OWN)

    async def parse(self, asked: DialectRequest) -> ParsedRequest:
        """Read a request; raises as `Dialect.read` says."""
        if asked.path == _ROOT and asked.method == "POST":
            return await _call(asked)
        if asked.path == f"{_ROOT}/input_tokens" and asked.method == "POST":
            return TokenCount(body=(await _read(asked)).body(), write=_say_count)
        return await answer_stored(asked, asked.path.removeprefix(_ROOT))

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        """Write OpenAI's error body."""
        del status
        return json_io.write({"error": error_members(message, kind, param)})


async def _call(asked: DialectRequest) -> ModelCall:
    request = await _read(asked)
    shared = {name: Raw(json_io.write(value)) for name, value in request.shown.items()}
    previous = f"resp_{request.previous}" if request.previous else None
    keep: Keep = _nothing
    if request.shown["store"]:
        library = Library(asked.documents)
        context = (
            await library.answered(request.items, request.previous)
            if request.previous
            else await library.continued(request.items, request.sent)
        )
        keep = partial(kept, asked.handle, context, shared)
    encoder = ResponsesReplyEncoder(
        asked.handle,
        model=member(request.fields, "model", (str,), ""),
        members={**shared, "previous_response_id": previous},
        names=request.offer.names,
        thoughts=member(request.fields, "include_reasoning", (bool,), True),
        sealed=SEALED in member(request.fields, "include", (list,), []),
        as_gym=asked.token_ids,
        keep=keep,
    )
    left_out = ("items-merged",) if request.talk.merged else ()
    return ModelCall(body=request.body(), encoder=encoder, handles=request.talk.handles, echoes=request.talk.echoes, left_out=left_out)


async def _read(asked: DialectRequest) -> _Request:
    fields = members_of(asked.body)
    if asked.token_ids:
        fields = gym_request.responses_members(fields)
    refuse_unsupported(fields)
    shown = members_shown(fields)
    instructions = member(fields, "instructions", (str,), None)
    handle, history = await _previous(asked, fields)
    new, echoes = items_of(fields, needed=not handle, kept=shown["store"])
    items = await Library(asked.documents).referred(new)
    talk = Talk()
    system, joined = instructions, 0
    if asked.token_ids and not history:
        stream = member(fields, "stream", (bool,), False)
        system, joined = gym_request.leading_system(instructions, [item for _, item in items], stream=stream)
    if system:
        talk.messages.append({"role": "system", "content": system})
    for i, (_, item) in enumerate(history):
        talk.add(item, ("previous", i))
    for i, (_, item) in enumerate(items[joined:], joined):
        talk.add(item, ("input", i), echoes.get(i))
    talk.close()
    offer = read_tools(shown["tools"])
    return _Request(
        fields=fields,
        shown={**shown, "instructions": instructions},
        items=items,
        sent=[raw for raw, _ in new],
        talk=talk,
        offer=offer,
        choice=choose(offer, shown["tool_choice"]),
        previous=handle,
        gym=asked.token_ids,
    )


async def _previous(asked: DialectRequest, fields: dict[str, Raw]) -> tuple[str, list[Item]]:
    """Find the response that a request continues: its handle, or `""`, and all its items."""
    name = member(fields, "previous_response_id", (str,), None)
    if name is None:
        return "", []
    ours = _ID.fullmatch(name)
    history = await Library(asked.documents).history(ours[1], output=True) if ours else None
    if ours is None or history is None:
        raise HarnessError(f"Previous response with id '{name}' not found.", param="previous_response_id", kind=NO_PREVIOUS)
    return ours[1], history


def _say_count(tokens: int) -> bytes:
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})


def _nothing(response: dict[str, Any]) -> dict[str, bytes]:
    del response
    return {}

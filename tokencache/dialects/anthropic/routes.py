"""The Anthropic Messages dialect: its routes, credential header and list of models.

    POST /v1/messages                 a call
    POST /v1/messages/count_tokens    the number of tokens of its prompt
    GET  /v1/models, /v1/models/ID    served models, for clients that send `anthropic-version`: OpenAI has the same routes

`GET /v1/models/ID` returns 404 for a model that the engine does not serve. In calls, the proxy replaces aliases of served models
(`claude-…`).
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from tokencache.dialects import json_io
from tokencache.dialects.anthropic.reply import AnthropicReplyEncoder
from tokencache.dialects.anthropic.request import read_request
from tokencache.dialects.anthropic.vocabulary import error_members
from tokencache.dialects.base import (
    AUTHORIZATION,
    DialectRequest,
    DirectReply,
    ModelCall,
    ParsedRequest,
    ServedModel,
    TokenCount,
    TranslatedDialect,
)
from tokencache.errors import HarnessError

_CALL = "/v1/messages"
_COUNT = "/v1/messages/count_tokens"
_MODELS = "/v1/models"
_VERSION = "anthropic-version"
_UNKNOWN_DATE = "1970-01-01T00:00:00Z"
"""Anthropic's API returns it for an unknown release date (`anthropic` 2.12 `types/model_info.py`)."""


class AnthropicDialect(TranslatedDialect):
    """Anthropic's Messages API, as `anthropic` 2.12 and Claude Code 2.1 use it."""

    name = "messages"
    credential_headers = ("x-api-key", AUTHORIZATION)

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """See `Dialect.matches`: a call, a token count, or a list of models for an Anthropic client."""
        if method == "POST":
            return path in {_CALL, _COUNT}
        return method == "GET" and (path == _MODELS or path.startswith(_MODELS + "/")) and _VERSION in headers

    async def parse(self, request: DialectRequest) -> ParsedRequest:
        """See `Dialect.parse`.

        Raises:
            HarnessError: chat has no equivalent, or the requested model does not exist.
        """
        if request.method == "GET":
            return await _models(request)
        if request.path == _COUNT:
            return TokenCount(body=(await read_request(request.body, counting=True)).body, write=_count)
        chat = await read_request(request.body)
        encoder = AnthropicReplyEncoder(chat.model, request.handle)
        return ModelCall(body=chat.body, encoder=encoder, handles=chat.handles, left_out=chat.left_out)

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:  # noqa: ARG002
        """See `Dialect.error`: Anthropic's error type follows from the status."""
        return json_io.write(error_members(status, message))


def _count(tokens: int) -> bytes:
    return json_io.write({"input_tokens": tokens})


async def _models(request: DialectRequest) -> DirectReply:
    if request.path == _MODELS:
        listed = [_model(model) for model in await request.served()]
        first, last = (listed[0]["id"], listed[-1]["id"]) if listed else (None, None)
        return DirectReply(body=json_io.write({"data": listed, "has_more": False, "first_id": first, "last_id": last}))
    name = request.path.removeprefix(_MODELS + "/")
    found = await request.find_model(name)
    if found is None:
        raise HarnessError(f"model: {unquote(name)}", status=HTTPStatus.NOT_FOUND, kind="not_found_error")
    return DirectReply(body=json_io.write(_model(found)))


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": _UNKNOWN_DATE,
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len or None,
    }

"""Anthropic Messages: the codec of Claude Code and of everything that uses an Anthropic SDK.

    POST /v1/messages                 a call                 `request`, `history` → `reply`
    POST /v1/messages/count_tokens    how long is it?
    GET  /v1/models, /v1/models/ID    what is served?        only of clients that send `anthropic-version`: the route is
                                                             OpenAI's too

A model that is not served is unknown, whatever it is called; names that stand for it (`claude-…`) are the proxy's business.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from tokencache.dialects import json_io
from tokencache.dialects.anthropic.reply import AnthropicReplyEncoder
from tokencache.dialects.anthropic.request import read_request
from tokencache.dialects.anthropic.vocabulary import error_members
from tokencache.dialects.base import AUTHORIZATION, DialectRequest, DirectReply, ModelCall, ParsedRequest, ServedModel, TokenCount
from tokencache.errors import HarnessError

_CALL = "/v1/messages"
_COUNT = "/v1/messages/count_tokens"
_MODELS = "/v1/models"
_VERSION = "anthropic-version"
_UNKNOWN_DATE = "1970-01-01T00:00:00Z"
"""What Anthropic's API says of a model whose release date is unknown (`anthropic` 2.12 `types/model_info.py`)."""


class AnthropicDialect:
    """Anthropic's Messages API, as `anthropic` 2.12 and Claude Code 2.1 speak it."""

    name = "messages"
    credential_headers: tuple[str, ...] = ("x-api-key", AUTHORIZATION)
    credential_parameters: tuple[str, ...] = ()

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request is a Messages call, a count, or a question for models by an Anthropic client."""
        if method == "POST":
            return path in {_CALL, _COUNT}
        return method == "GET" and (path == _MODELS or path.startswith(_MODELS + "/")) and _VERSION in headers

    async def parse(self, asked: DialectRequest) -> ParsedRequest:
        """Read a request.

        Raises:
            HarnessError: it cannot be said in chat, or asks for a model that is not there.
        """
        if asked.method == "GET":
            return await _models(asked)
        if asked.path == _COUNT:
            return TokenCount(body=read_request(asked.body, counting=True).body, write=_count)
        request = read_request(asked.body)
        return ModelCall(
            body=request.body,
            encoder=AnthropicReplyEncoder(request.model, asked.handle),
            handles=request.handles,
            left_out=request.left_out,
        )

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:  # noqa: ARG002 - no place for them here
        """Write an error's body: Anthropic's types follow the status."""
        return json_io.write(error_members(status, message))


def _count(tokens: int) -> bytes:
    return json_io.write({"input_tokens": tokens})


async def _models(asked: DialectRequest) -> DirectReply:
    served = await asked.served()
    if asked.path == _MODELS:
        listed = [_model(model) for model in served]
        first, last = (listed[0]["id"], listed[-1]["id"]) if listed else (None, None)
        return DirectReply(body=json_io.write({"data": listed, "has_more": False, "first_id": first, "last_id": last}))
    name = unquote(asked.path.removeprefix(_MODELS + "/"))
    found = next((model for model in served if model.name == name), None)
    if found is None:
        raise HarnessError(f"model: {name}", status=404, kind="not_found_error")
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

"""Answers requests that clients send before they call a model, and for which they need another answer than stock vLLM's.

==============================  ===================================================================================
`HEAD /`, `/v1`, `/v1/models`   200: the server is alive. vLLM 0.32 refuses the method or has no such route; a `GET` is relayed.
                                `HEAD /api/hello` is Claude Code's
`GET|HEAD /v1/models/<id>`      OpenAI's `models.retrieve`, which vLLM 0.32 lacks; Hermes reads `max_model_len` there
`/api/show`, `/api/tags`, …     404 in vLLM's form, whatever the engine would answer: the server is not Ollama, LM Studio or
                                llama.cpp. Hermes (0.19, `agent/model_metadata.py`) then requests `/version` and detects vLLM
==============================  ===================================================================================

`/health` and `/version` are relayed.
"""

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import msgspec

from tokencache.dialects.base import DialectRequest, DirectReply, ParsedRequest, ServedModel
from tokencache.dialects.untranslated import UntranslatedDialect
from tokencache.errors import HarnessError

_ALIVE = frozenset({"/", "/v1", "/v1/", "/v1/models", "/api/hello"})
_MODEL = re.compile(r"/v1/models/(.+)")
_OTHERS = frozenset({"/api/show", "/api/tags", "/api/version", "/api/ps", "/api/v1/models", "/api/v0/models", "/props", "/v1/props"})
"""Routes of other servers. With a response other than 404, clients would mistake the proxy for one of them."""


class ProbeDialect(UntranslatedDialect):
    """Requests that any client may send, answered without a model call; credentials and errors are those of chat completions."""

    name = "probe"

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """See `Dialect.matches`."""
        del headers
        if path in _OTHERS:
            return True
        return (method == "HEAD" and path in _ALIVE) or (method in {"GET", "HEAD"} and _MODEL.fullmatch(path) is not None)

    async def parse(self, request: DialectRequest) -> ParsedRequest:
        """See `Dialect.parse`.

        Raises:
            HarnessError: 404, no such model.
            EngineError: the served models are unknown.
        """
        if request.path in _OTHERS:
            return DirectReply(body=b'{"detail":"Not Found"}', status=HTTPStatus.NOT_FOUND)
        wanted = _MODEL.fullmatch(request.path)
        if wanted is None:
            return DirectReply(body=b"{}")
        model = await request.find_model(wanted[1])
        if model is not None:
            return DirectReply(body=msgspec.json.encode(_card(model)))
        name = unquote(wanted[1])
        raise HarnessError(f"The model `{name}` does not exist.", status=HTTPStatus.NOT_FOUND, param="model", kind="NotFoundError")


def model_list(models: Iterable[ServedModel]) -> bytes:
    """Write the response to `GET /v1/models`, for an engine without that route."""
    return msgspec.json.encode({"object": "list", "data": [_card(model) for model in models]})


def _card(model: ServedModel) -> dict[str, Any]:
    card = {"id": model.name, "object": "model", "created": 0, "owned_by": "vllm"}
    return card | ({"max_model_len": model.max_model_len} if model.max_model_len else {})

"""Probes: what harnesses ask before they call a model, and what stock vLLM would not answer, or not as they need it.

==============================  ===================================================================================
`HEAD /`, `/v1`, `/v1/models`   is anybody there? Yes. vLLM 0.32 refuses the method or knows no such route; a `GET` there is its own
                                to answer, and is relayed. (`/api/hello`, too: Claude Code)
`GET|HEAD /v1/models/<id>`      OpenAI's `models.retrieve`, which vLLM 0.32 has not; Hermes reads `max_model_len` there
`/api/show`, `/api/tags`, …     is this Ollama, LM Studio, llama.cpp? No, 404 as vLLM says it, whatever the engine would:
                                Hermes (0.19, `agent/model_metadata.py`) then asks `/version` and takes it for vLLM
==============================  ===================================================================================

`/health` and `/version` are the engine's own, and relayed.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from tokencache.dialects.base import AUTHORIZATION, DialectRequest, DirectReply, ParsedRequest, ServedModel
from tokencache.errors import HarnessError

_ALIVE = frozenset({"/", "/v1", "/v1/", "/v1/models", "/api/hello"})
_MODEL = re.compile(r"/v1/models/(.+)")
_OTHERS = frozenset({"/api/show", "/api/tags", "/api/version", "/api/ps", "/api/v1/models", "/api/v0/models", "/props", "/v1/props"})
"""Routes of other servers, whose answer a harness would take for those servers' own."""
_NOT_FOUND = 404


class ProbeDialect:
    """See `dialect.Dialect`."""

    name = "probe"
    credential_headers: tuple[str, ...] = (AUTHORIZATION,)
    credential_parameters: tuple[str, ...] = ()

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """See `Dialect.speaks`."""
        del headers
        if path in _OTHERS:
            return True
        return (method == "HEAD" and path in _ALIVE) or (method in {"GET", "HEAD"} and _MODEL.fullmatch(path) is not None)

    async def parse(self, asked: DialectRequest) -> ParsedRequest:
        """See `Dialect.read`.

        Raises:
            HarnessError: 404, no such model.
            EngineError: which models are served cannot be found out.
        """
        if asked.path in _OTHERS:
            return DirectReply(body=b'{"detail":"Not Found"}', status=_NOT_FOUND)
        wanted = _MODEL.fullmatch(asked.path)
        if wanted is None:
            return DirectReply(body=b"{}")
        name = unquote(wanted[1])
        for model in await asked.served():
            if model.name == name:
                return DirectReply(body=msgspec.json.encode(_card(model)))
        raise HarnessError(f"The model `{name}` does not exist.", status=_NOT_FOUND, param="model", kind="NotFoundError")

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        """See `Dialect.error`: OpenAI's, as vLLM writes it."""
        return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def model_list(models: Iterable[ServedModel]) -> bytes:
    """The answer to `GET /v1/models`, for an engine that has no such route."""
    return msgspec.json.encode({"object": "list", "data": [_card(model) for model in models]})


def _card(model: ServedModel) -> dict[str, Any]:
    card = {"id": model.name, "object": "model", "created": 0, "owned_by": "vllm"}
    return card | ({"max_model_len": model.max_model_len} if model.max_model_len else {})

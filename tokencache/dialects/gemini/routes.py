"""The Gemini dialect: its routes, credentials and list of models (Gemini API, google-genai 3.4).

    POST /v1beta/models/<model>:generateContent          one GenerateContentResponse
    POST /v1beta/models/<model>:streamGenerateContent    with ?alt=sse events, without it one JSON array, streamed
    POST /v1beta/models/<model>:countTokens
    GET  /v1beta/models, /v1beta/models/<model>

`/v1` and `/v1alpha` work like `/v1beta`. Lists of models under `/v1` are OpenAI's unless the request has Google's headers. The model's name
in the path may have slashes (`Qwen/Qwen3-8B`) or be percent-encoded.
"""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from tokencache.dialects import json_io
from tokencache.dialects.base import (
    DialectRequest,
    DirectReply,
    ModelCall,
    ParsedRequest,
    ServedModel,
    TokenCount,
    TranslatedDialect,
)
from tokencache.dialects.gemini.reply import GeminiReplyEncoder
from tokencache.dialects.gemini.request import Contents, chat_settings
from tokencache.dialects.gemini.vocabulary import RequestObject, error_of
from tokencache.dialects.reply_encoder import EVENT_STREAM
from tokencache.errors import HarnessError
from tokencache.pauses import MESSAGES, pause

_METHOD = re.compile(r"/v1(?:beta|alpha)?/(?:models|tunedModels)/(.+):(\w+)")
_MODELS = re.compile(r"/v1(beta|alpha)?/models(?:/(.+))?")
_METHODS = ["generateContent", "countTokens"]


class GeminiDialect(TranslatedDialect):
    """Google's Gemini API, as google-genai 3.4 uses it."""

    name = "gemini"
    credential_headers = ("x-goog-api-key",)
    credential_parameters = ("key",)

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """See `Dialect.matches`."""
        if method == "POST":
            return _METHOD.fullmatch(unquote(path)) is not None
        listed = _MODELS.fullmatch(path) if method == "GET" else None
        return listed is not None and (listed[1] is not None or "x-goog-api-key" in headers or "x-goog-api-client" in headers)

    async def parse(self, request: DialectRequest) -> ParsedRequest:
        """See `Dialect.parse`."""
        called = _METHOD.fullmatch(unquote(request.path)) if request.method == "POST" else None
        if called is None:
            return await _models(request)
        model, method = called[1], called[2]
        try:
            match method:
                case "generateContent" | "streamGenerateContent":
                    return await _generate(request, model, stream=method == "streamGenerateContent")
                case "countTokens":
                    return await _count(request, model)
        except RecursionError:
            raise HarnessError("the request is nested too deeply") from None
        raise HarnessError(f"{method} is not supported: the methods are {' and '.join(_METHODS)}", status=HTTPStatus.NOT_FOUND)

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        """See `Dialect.error`: the type follows from the status, and the message names the member."""
        del kind, param
        return json_io.write(error_of(status, message))


async def _generate(request: DialectRequest, model: str, *, stream: bool) -> ModelCall:
    body = RequestObject(json_io.read_body(request.body), "")
    contents, settings = await _conversation(body), chat_settings(body)
    chat: dict[str, Any] = {"messages": contents.messages, "model": model, "stream": stream}
    if stream:
        chat["stream_options"] = {"include_usage": True}
    sse = request.query.get("alt") == "sse"
    encoder = GeminiReplyEncoder(model=model, handle=request.handle, shows_thoughts="include_reasoning" not in settings, sse=sse)
    media_type = EVENT_STREAM if sse else "application/json"
    return ModelCall(
        body=json_io.write(chat | settings), encoder=encoder, handles=contents.handles, left_out=contents.left_out, media_type=media_type
    )


async def _count(request: DialectRequest, model: str) -> TokenCount:
    """Parse a request for a token count: of contents alone, or of a whole request."""
    body = RequestObject(json_io.read_body(request.body), "")
    body = body.inner("generateContentRequest") or body
    chat = {"messages": (await _conversation(body)).messages, "model": model} | chat_settings(body)
    return TokenCount(body=json_io.write(chat), write=_write_count)


def _write_count(tokens: int) -> bytes:
    return json_io.write({"totalTokens": tokens})


async def _conversation(body: RequestObject) -> Contents:
    contents = Contents()
    contents.system(body.get("systemInstruction"))
    listed = body.objects("contents")
    if not listed:
        raise HarnessError("contents is not specified", param="contents")
    for i, content in enumerate(listed):
        if i % MESSAGES == MESSAGES - 1:
            await pause()
        contents.add(content)
    contents.close()
    return contents


async def _models(request: DialectRequest) -> DirectReply:
    called = _MODELS.fullmatch(request.path)
    if called is None or called[2] is None:
        return DirectReply(body=json_io.write({"models": [_model(model) for model in await request.served()]}))
    found = await request.find_model(called[2])
    if found is None:
        raise HarnessError(f"models/{unquote(called[2])} is not found", status=HTTPStatus.NOT_FOUND)
    return DirectReply(body=json_io.write(_model(found)))


def _model(model: ServedModel) -> dict[str, Any]:
    card: dict[str, Any] = {"name": f"models/{model.name}", "displayName": model.name, "supportedGenerationMethods": _METHODS}
    if model.max_model_len:
        card |= {"inputTokenLimit": model.max_model_len, "outputTokenLimit": model.max_model_len}
    return card

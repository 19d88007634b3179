"""Gemini: `generateContent` and its kin, as the Gemini API and google-genai 3.4 speak it.

    POST /v1beta/models/<model>:generateContent          one GenerateContentResponse
    POST /v1beta/models/<model>:streamGenerateContent    with ?alt=sse events, without it one JSON array, streamed
    POST /v1beta/models/<model>:countTokens
    GET  /v1beta/models, /v1beta/models/<model>

`/v1` and `/v1alpha` are as good as `/v1beta`; lists of models under `/v1` are OpenAI's unless the request brings Google's
headers. The model's name stands in the path and may hold slashes (`Qwen/Qwen3-8B`) or be percent-encoded.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from tokencache.dialects import json_io
from tokencache.dialects.base import EVENT_STREAM, DialectRequest, DirectReply, ModelCall, ParsedRequest, ServedModel, TokenCount
from tokencache.dialects.gemini.reply import GeminiReplyEncoder
from tokencache.dialects.gemini.request import Contents, chat_settings
from tokencache.dialects.gemini.vocabulary import RequestObject, entry, error_of
from tokencache.errors import HarnessError

_METHOD = re.compile(r"/v1(?:beta|alpha)?/(?:models|tunedModels)/(.+):(\w+)")
_MODELS = re.compile(r"/v1(beta|alpha)?/models(?:/(.+))?")
_METHODS = ["generateContent", "countTokens"]
_NOT_FOUND = 404


class GeminiDialect:
    """See `dialect.Dialect`."""

    name = "gemini"
    credential_headers: tuple[str, ...] = ("x-goog-api-key",)
    credential_parameters: tuple[str, ...] = ("key",)

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """See `Dialect.speaks`."""
        if method == "POST":
            return _METHOD.fullmatch(unquote(path)) is not None
        listed = _MODELS.fullmatch(path) if method == "GET" else None
        return listed is not None and (listed[1] is not None or "x-goog-api-key" in headers or "x-goog-api-client" in headers)

    async def parse(self, asked: DialectRequest) -> ParsedRequest:
        """See `Dialect.read`."""
        called = _METHOD.fullmatch(unquote(asked.path)) if asked.method == "POST" else None
        if called is None:
            return await _models(asked)
        model, method = called[1], called[2]
        try:
            match method:
                case "generateContent" | "streamGenerateContent":
                    return _generate(asked, model, stream=method == "streamGenerateContent")
                case "countTokens":
                    return _count(asked, model)
        except RecursionError:
            raise HarnessError("the request is nested too deeply") from None
        raise HarnessError(f"{method} is not supported: this model is asked by {' and '.join(_METHODS)}", status=_NOT_FOUND)

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        """See `Dialect.error`: kinds are told by the status here, and a message names the member itself."""
        del kind, param
        return json_io.write(error_of(status, message))


def _generate(asked: DialectRequest, model: str, *, stream: bool) -> ModelCall:
    request = entry(json_io.read_body(asked.body), "")
    contents, settings = _conversation(request), chat_settings(request)
    said: dict[str, Any] = {"messages": contents.messages, "model": model, "stream": stream}
    if stream:
        said["stream_options"] = {"include_usage": True}
    sse = asked.query.get("alt") == "sse"
    encoder = GeminiReplyEncoder(model=model, handle=asked.handle, shows_thoughts="include_reasoning" not in settings, sse=sse)
    media_type = EVENT_STREAM if sse else "application/json"
    return ModelCall(body=json_io.write(said | settings), encoder=encoder, handles=contents.handles, media_type=media_type)


def _count(asked: DialectRequest, model: str) -> TokenCount:
    """Read a question for a count: of contents alone, or of a whole request."""
    body = entry(json_io.read_body(asked.body), "")
    request = body.inner("generateContentRequest") or body
    settings = chat_settings(request)
    return TokenCount(body=json_io.write({"messages": _conversation(request).messages, "model": model} | settings), write=_counted)


def _counted(tokens: int) -> bytes:
    return json_io.write({"totalTokens": tokens})


def _conversation(request: RequestObject) -> Contents:
    contents = Contents()
    contents.system(request.get("systemInstruction"))
    listed = request.objects("contents")
    if not listed:
        raise HarnessError("contents is not specified", param="contents")
    for content in listed:
        contents.add(content)
    contents.close()
    return contents


async def _models(asked: DialectRequest) -> DirectReply:
    found = _MODELS.fullmatch(asked.path)
    served = await asked.served()
    if found is None or found[2] is None:
        return DirectReply(body=json_io.write({"models": [_model(model) for model in served]}))
    wanted = unquote(found[2])
    for model in served:
        if model.name == wanted:
            return DirectReply(body=json_io.write(_model(model)))
    raise HarnessError(f"models/{wanted} is not found", status=_NOT_FOUND)


def _model(model: ServedModel) -> dict[str, Any]:
    said: dict[str, Any] = {"name": f"models/{model.name}", "displayName": model.name, "supportedGenerationMethods": _METHODS}
    if model.max_model_len:
        said |= {"inputTokenLimit": model.max_model_len, "outputTokenLimit": model.max_model_len}
    return said

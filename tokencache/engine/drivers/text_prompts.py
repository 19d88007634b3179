"""Drives a vLLM that accepts exact prompts only as text completions, and parses its replies with `derender`.

This is for a vLLM that ignores ids in chat requests (0.20 to 0.26), where the plugin cannot be installed. A call with an exact prompt
takes up to three requests, which become one chat completion for the rest of the proxy:

1. *Guidance.* For a chat request, vLLM derives constraints of the sampling from tools and formats, and has a default limit for the reply.
   `/v1/chat/completions/render` returns both. The driver calls it once for each set of tools, with the tools of the call and a fixed
   question instead of its messages.
2. *Tokens.* `/v1/completions` with `prompt: [ids]` samples. Its answer has the ids and log probabilities.
3. *Message.* `/v1/chat/completions/derender` parses the tokens with the same parsers as chat. It exists in vLLM 0.24 and later; since 0.30
   it needs `--enable-scale-out`. A `vllm launch render` sidecar always has it.

A call without an exact prompt is an ordinary chat completion, which vLLM renders, including media.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from multidict import CIMultiDict

from tokencache.core import ids
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.whole import whole_members
from tokencache.dialects.json_io import NULL
from tokencache.dialects.members import CHAT_ONLY, GUIDING, LIMITS
from tokencache.engine.derender import ANY_MESSAGES, RENDER
from tokencache.engine.drivers.base import EngineRequest, ExactPrompt, Target
from tokencache.engine.drivers.derendered import DerenderedPrompts, ParseReply
from tokencache.engine.drivers.parsed_completion import ReplacedChat, parse_completion
from tokencache.engine.drivers.vllm import binds_late, members_with_ids
from tokencache.engine.upstream import EngineClient, EngineResponse, Upstream
from tokencache.errors import EngineError
from tokencache.recent import Recent

Raw = msgspec.Raw

COMPLETIONS = "/v1/completions"
UNSUPPORTED = Reason.NOT_FOR_COMPLETIONS
"""The reason for a call that text completions cannot express, so that it is sent as a chat completion."""

_EMPTY = frozenset({b"null", b"[]", b"{}"})
_NOT_EVERYWHERE = ("bad_words",)
"""Members of a chat request that vLLM's text completions silently ignored in 0.20 to 0.25."""
_MOST_GUIDES = 256


class Guidance(NamedTuple):
    """How vLLM would sample a chat request: its constraints (`structured_outputs`), and the default limit for a reply, in tokens."""

    outputs: Mapping[str, Any] | None = None
    limit: int | None = None


class _Sampling(msgspec.Struct):
    max_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None


class _Rendered(msgspec.Struct):
    """vLLM's `GenerateRequest`, as `render` returns it."""

    sampling_params: _Sampling

    def guidance(self) -> Guidance:
        outputs = self.sampling_params.structured_outputs or {}
        public = {name: value for name, value in outputs.items() if value is not None and not name.startswith("_")}
        return Guidance(public or None, self.sampling_params.max_tokens)


class TextPrompts(DerenderedPrompts):
    """The driver `completions`. `parser` answers render and derender; if it is `None`, the engine does."""

    name = "completions"
    how = "prompts of /v1/completions, parsed by derender"
    images = False

    def __init__(self, parser: Upstream | None = None) -> None:
        super().__init__(parser)
        self._guidance: Recent[bytes, Guidance] = Recent(_MOST_GUIDES)

    async def request(self, call: ChatCall, prompt: ExactPrompt | None, target: Target) -> EngineRequest:
        """See `Driver.request`: a text completion for an exact prompt, a chat completion without one."""
        if prompt is None:
            return await super().request(call, prompt, target)
        body = await self._completion(call, prompt, target)
        if body is None:
            return EngineRequest(target.path, self.write(call, None), not_exact=UNSUPPORTED, late_grammar=binds_late(call))
        replaced = ReplacedChat(target.upstream, call.safe_fields(), target.headers)
        return EngineRequest(COMPLETIONS, body, partial(parse_completion, self._derender, replaced), late_grammar=binds_late(call))

    async def _completion(self, call: ChatCall, prompt: ExactPrompt, target: Target) -> bytes | None:
        """Write the text completion; `None` if it cannot express the call, or if the guidance is not available."""
        fields = members_with_ids(call)
        if bytes(fields.get("logprobs", NULL)) != b"true" or any(_has(fields, name) for name in _NOT_EVERYWHERE):
            return None
        constrained = any(_has(fields, name) for name in ("tools", "response_format", "structured_outputs"))
        if not constrained and any(_has(fields, name) for name in LIMITS):
            return text_completion(fields, prompt.fragment, Guidance())
        guidance = await self._guidance_for(fields, target)
        if guidance is None:
            return None
        room = target.max_model_len - ids.count(prompt.ids) if target.max_model_len else guidance.limit
        limit = min(filter(None, (guidance.limit, room)), default=None)
        return text_completion(fields, prompt.fragment, guidance._replace(limit=limit))

    async def _guidance_for(self, fields: Mapping[str, Raw], target: Target) -> Guidance | None:
        body = msgspec.json.encode({name: fields[name] for name in ("model", *GUIDING) if name in fields} | {"messages": ANY_MESSAGES})
        key = hashlib.blake2b(body, digest_size=16).digest()
        found = self._guidance.get(key)
        if found is None:
            try:
                answer = await self._ask_parser(target.upstream, RENDER, body, target.headers)
                if answer.status != HTTPStatus.OK:
                    return None
                found = self._guidance[key] = msgspec.json.decode(answer.body, type=_Rendered).guidance()
            except (EngineError, ValueError, RecursionError):
                return None
        return found

    async def _ask_parser(self, upstream: EngineClient, path: str, body: bytes, headers: CIMultiDict[str] | None) -> EngineResponse:
        """Post to the parser, or to the engine if there is none; only the engine gets the harness's own headers."""
        return await (upstream.query(path, body, headers) if self._parser is None else self._parser.query(path, body))

    async def _sample(self, request: ReplacedChat, prompt: list[int]) -> tuple[EngineResponse, ParseReply]:
        body = text_completion(request.fields, ids.Fragment.of(ids.pack(prompt)), Guidance())
        return await request.upstream.post(COMPLETIONS, body), parse_completion


def text_completion(fields: Mapping[str, Raw], prompt: ids.Fragment, guidance: Guidance) -> bytes:
    """Write a chat request as a text completion with a prompt of these ids (a JSON fragment).

    A call without a limit gets the guidance's limit, because the default of text completions is 16 tokens, even for `null`.
    """
    body: dict[str, Any] = {name: value for name, value in whole_members(fields).items() if name not in CHAT_ONLY}
    body["max_tokens"] = next((fields[name] for name in LIMITS if _has(fields, name)), guidance.limit)
    if bytes(fields.get("logprobs", NULL)) == b"true":
        most = fields.get("top_logprobs", NULL)
        body["logprobs"] = most if bytes(most) != b"null" else 0
    if guidance.outputs is not None:
        body["structured_outputs"] = guidance.outputs
    body |= {"return_token_ids": True, "skip_special_tokens": False}
    return b"".join((memoryview(msgspec.json.encode(body))[:-1], b',"prompt":[', *prompt.pieces, b"]}"))


def _has(fields: Mapping[str, Raw], name: str) -> bool:
    return bytes(fields.get(name, NULL)) not in _EMPTY

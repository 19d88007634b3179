"""A test server with the contract of NeMo Gym's model server in front of NeMo RL's worker, as strict as the original.

NVIDIA-NeMo/Gym, `responses_api_models/vllm_model/app.py` and `nemo_gym/openai_utils.py`: unknown members of a request are refused (422),
the engine's parameters in `metadata` are unpacked, the three token members of a message are all present or all absent, reasoning is sent
within the text, and the worker's ids on the message. It renders nothing: it has no `/tokenize`.

It was written from that description, for tests of the proxy in front of it.
"""

import contextlib
import json
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from tests.engine.listening import listening
from tests.system.nemo.worker import TOKEN_FIELDS

_MEMBERS = """
    messages model audio frequency_penalty logit_bias logprobs max_completion_tokens max_tokens metadata moderation modalities n
    parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_retention reasoning_effort response_format seed
    safety_identifier service_tier stop store stream_options temperature tool_choice tools top_logprobs top_p user verbosity
    web_search_options stream
"""
_KNOWS = set(_MEMBERS.split())


@dataclass
class GymServer:
    """A model server in front of the worker at `upstream`; `calls` are the bodies that it received."""

    upstream: str
    return_token_id_information: bool = True
    calls: list = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def serve(self):
        """Serves on a free port; yields the base URL."""
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/chat/completions", self._chat)
        async with aiohttp.ClientSession() as self._http, listening(app) as url:
            yield url

    async def _chat(self, request):
        body = json.loads(await request.read())
        self.calls.append(json.loads(json.dumps(body)))
        wrong = sorted(body.keys() - _KNOWS) + [m["role"] for m in body["messages"] if 0 < len(m.keys() & set(TOKEN_FIELDS)) < 3]
        wrong += [m["role"] for m in body["messages"] if "reasoning" in m]
        if wrong or body.get("stream") or any(not isinstance(value, str) for value in (body.get("metadata") or {}).values()):
            return web.json_response({"detail": [{"type": "extra_forbidden", "loc": ["body", *wrong]}]}, status=422)
        metadata = body.get("metadata") or {}
        arguments = json.loads(metadata.get("chat_template_kwargs", "{}"))
        sent = json.loads(metadata.get("extra_body", "{}")) | body | ({"chat_template_kwargs": arguments} if arguments else {})
        if self.return_token_id_information:
            sent |= {"logprobs": True, "top_logprobs": 0}
        kept = {name: request.headers[name] for name in ("X-Session-ID", "X-Request-Id") if name in request.headers}
        async with self._http.post(self.upstream + "/v1/chat/completions", json=sent, headers=kept) as answer:
            raw, status = await answer.read(), answer.status
        if status != 200:
            return web.Response(status=status, body=raw, content_type=answer.content_type)
        reply = json.loads(raw)
        message = reply["choices"][0]["message"]
        thought = message.pop("reasoning", None)
        if thought:
            message["content"] = f"<think>{thought}</think>" + (message.get("content") or "")
        if self.return_token_id_information:
            reply["choices"][0].pop("logprobs", None)
        else:
            for name in TOKEN_FIELDS:
                message.pop(name)
        return web.json_response(reply)

"""A test server with the contract of NeMo RL's vLLM worker, in front of any engine that accepts exact prompts.

NeMo RL (`nemo_rl/models/generation/vllm/vllm_worker_async.py`, `openai_server_utils.py`) serves the policy over
`POST /v1/chat/completions`, never streamed, and `POST /tokenize`, and nothing else. Both accept `required_prefix_token_ids`: the messages
are rendered twice, whole and up to the last assistant message, and everything before the N-th end of turn is replaced by the exact ids, N
being the count in the shorter rendering. Without that field the last message that carries `prompt_token_ids` determines the prefix; with
it the ids on messages are ignored. Sampling parameters that differ from the trainer's raise an assertion, which a client receives as a
bare 500; a request for log probabilities must set `top_logprobs`, too. An answer's message carries its ids and log probabilities.

It was written from that description, for the simulated engine and a real vLLM.
"""

import contextlib
import json
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from tests.engine.listening import listening

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def splice(prefix, template_prefix, template, eos):
    """Replaces a rendered history by an exact prefix.

    Raises:
        AssertionError: The rendering has fewer ends of turn than its own beginning.
    """
    if not prefix:
        return template
    wanted = template_prefix.count(eos)
    places = [at for at, token in enumerate(template) if token == eos]
    assert 0 < wanted <= len(places), f"EOS token #{wanted} not found: there are {len(places)}"
    cut = prefix[:-1] if prefix[-1] == eos else prefix
    return cut + template[places[wanted - 1] :]


@dataclass
class Worker:
    """A worker in front of the engine at `upstream`, whose end of turn is `eos`.

    `calls` are the bodies of the chat calls that it received; `unknown` the paths that it answered with 404.
    """

    upstream: str
    eos: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_model_len: int = 0
    calls: list = field(default_factory=list)
    unknown: list = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def serve(self):
        """Serves on a free port; yields the base URL."""
        app = web.Application(client_max_size=2**28, middlewares=[_assertions])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_route("*", "/{path:.*}", self._not_found)
        async with aiohttp.ClientSession() as self._http, listening(app) as url:
            yield url

    async def _chat(self, request):
        body = json.loads(await request.read())
        self.calls.append(body)
        assert body.get("top_k") in {None, -1}
        assert body.get("temperature") == self.temperature
        assert body.get("top_p") == self.top_p
        assert not body.get("stream"), "streaming"
        if body.get("logprobs") and body.get("top_logprobs") is None:
            error = {"message": "`top_logprobs` must be set", "type": "BadRequestError", "param": "top_logprobs", "code": 400}
            return web.json_response({"error": error}, status=400)
        assert body.get("n", 1) == 1
        prompt = await self._prompt(body)
        sent = {name: value for name, value in body.items() if name not in {"required_prefix_token_ids", "kv_transfer_params"}}
        sent["messages"] = _bare(body["messages"])
        sent |= {"return_token_ids": True, "logprobs": True, "include_reasoning": True, "return_tokens_as_token_ids": True}
        for name in ("max_tokens", "max_completion_tokens"):
            if sent.get(name) is not None and self.max_model_len:
                sent[name] = min(sent[name], max(0, self.max_model_len - len(prompt)))
        kept = {name: request.headers[name] for name in ("X-Session-ID", "X-Request-Id") if name in request.headers}
        status, answer_json = await self._ask("/v1/chat/completions", {**sent, "kv_transfer_params": {"prompt_token_ids": prompt}}, kept)
        if status != 200:
            return web.json_response(answer_json, status=status)
        (choice,) = answer_json["choices"]
        values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        ids = (answer_json.pop("prompt_token_ids"), choice.pop("token_ids"), values)
        choice["message"] |= dict(zip(TOKEN_FIELDS, ids, strict=True))
        return web.json_response(answer_json)

    async def _not_found(self, request):
        self.unknown.append(request.path)
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _tokenize(self, request):
        body = json.loads(await request.read())
        ids = await self._prompt(body) if "messages" in body else await self._render(body)
        return web.json_response({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None})

    async def _prompt(self, body):
        """The prompt of a request: rendered, and spliced if a prefix is required."""
        messages = body["messages"]
        prefix = body.get("required_prefix_token_ids")
        if prefix is None:
            found = next((m for m in reversed(messages) if "prompt_token_ids" in m), None)
            prefix = found and found["prompt_token_ids"] + found["generation_token_ids"]
        rendered = await self._render(body | {"messages": _bare(messages)})
        if prefix is None:
            return rendered
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages) - 1)
        shorter = {"messages": _bare(messages[: last + 1]), "add_generation_prompt": False}
        return splice(prefix, await self._render(body | shorter), rendered, self.eos)

    async def _render(self, body):
        names = ("model", "messages", "prompt", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")
        status, answer_json = await self._ask("/tokenize", {name: body[name] for name in names if name in body})
        assert status == 200, answer_json
        return answer_json["tokens"]

    async def _ask(self, path, body, headers=None):
        async with self._http.post(self.upstream + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@web.middleware
async def _assertions(request, handler):
    """uvicorn's answer to an unhandled exception."""
    try:
        return await handler(request)
    except (AssertionError, KeyError):
        return web.Response(status=500, text="Internal Server Error")


def _bare(messages):
    return [{name: value for name, value in message.items() if name not in TOKEN_FIELDS} for message in messages]

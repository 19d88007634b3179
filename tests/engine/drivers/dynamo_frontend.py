"""The frontend of NVIDIA's Dynamo (ai-dynamo 1.6.1), simulated before an engine with vLLM's routes; it answers as the real one does."""

import json

from aiohttp import web

from tests.engine.intermediary import Intermediary

COMPLETIONS = "/v1/completions"
REFUSED = {
    *("return_token_ids", "include_reasoning", "return_weight_versions", "priority", "structured_outputs", "bad_words", "vllm_xargs"),
    *("kv_transfer_params", "chat_template", "documents", "add_special_tokens", "truncate_prompt_tokens", "echo", "request_id"),
}
RENDERED = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "prompt")
VOCABULARY = 2**20


class DynamoFrontend(Intermediary):
    """Gives the engine at `upstream` the routes and members of Dynamo's frontend.

    Attributes:
        ready: whether a worker has registered.
        kv: whether the router's mode is `kv`: in others `query_instance_id:` samples.
        migrated: the number of requests that it has moved to another worker.
        dies_after: number of chunks after which the worker dies; `None` if it lives.
        miscounts: how many tokens too many it counts in a prompt.
        drops: how many ids it leaves out at the beginning of a prompt.
        asked: the requests of sessions that sampled, and their `headers`.
        rendered: the requests that did not.
        ended: the sessions whose end it was told, in that order.
    """

    def __init__(self, upstream):
        super().__init__(upstream)
        self.ready, self.kv, self.migrated, self.dies_after, self.miscounts = True, True, 0, None, 0
        self.drops = 0
        self.ended = []
        self.asked, self.rendered, self.headers = [], [], []

    async def _pass(self, request):
        match request.method, request.path:
            case "GET", "/health":
                return web.json_response({"status": "healthy", "endpoints": [], "instances": []})
            case "GET", "/v1/models":
                model = {"id": "sim", "object": "model", "created": 1, "owned_by": "nvidia", "context_window": 4096}
                return web.json_response({"object": "list", "data": [model] * self.ready})
            case "GET", "/metrics":
                labels = 'model="sim",migration_type="ongoing_request",outcome="success"'
                return web.Response(text=f"dynamo_frontend_model_migration_total{{{labels}}} {self.migrated}\n" * bool(self.migrated))
            case "POST", "/v1/chat/completions" | "/v1/completions" if self.ready:
                return await self._serve(request)
        return web.Response(status=404)

    async def _serve(self, request):
        body = await request.json()
        extension = body.pop("nvext", None) or {}
        fields, ids = extension.get("extra_fields") or [], extension.get("token_data")
        if (refusal := _refusal(body, fields, ids)) is not None:
            return refusal
        if "query_instance_id:" in extension.get("annotations", []) and self.kv:
            return await self._render(request, body)
        if "X-Session-ID" in request.headers:
            self.asked.append({**body, "nvext": extension})
            self.headers.append(request.headers)
        if ids is not None:
            body["kv_transfer_params"] = {"prompt_token_ids": ids[self.drops :]}
        continuous = (body.get("stream_options") or {}).pop("continuous_usage_stats", False)
        kept = {name: request.headers[name] for name in ("X-Session-ID", "X-Request-Id") if name in request.headers}
        body["return_token_ids"] = True
        async with self._http.post(self.upstream + request.path, json=body, headers=kept) as answer:
            if answer.status != 200:
                return _error(answer.status, (await answer.json())["error"]["message"])
            if answer.content_type != "text/event-stream":
                return web.json_response(_as_dynamo(await answer.json(), fields, whole=True))
            return await self._stream(request, answer, fields, continuous=continuous)

    async def _render(self, request, body):
        if request.headers.get("X-Dynamo-Session-Final") == "true":
            self.ended.append(request.headers["X-Dynamo-Session-ID"])
        self.rendered.append(body)
        kept = {name: body[name] for name in RENDERED if name in body}
        if request.path == COMPLETIONS:
            kept["add_special_tokens"] = False
        async with self._http.post(f"{self.upstream}/tokenize", json={"model": "sim", **kept}) as answer:
            if answer.status != 200:
                return _error(400, "Invalid request")
            found = (await answer.json())["tokens"]
        return web.json_response({"id": "x", "choices": [{"index": 0}], "model": "sim", "nvext": {"token_ids": found}})

    def lifetime(self):
        """The number of chunks of a stream after which its worker dies; `None` if it lives."""
        return self.dies_after

    async def _stream(self, request, answer, fields, *, continuous):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        prompt, sampled, sent, lifetime = [], 0, 0, self.lifetime()
        async for line in answer.content:
            data = line.removeprefix(b"data: ").strip()
            if not data.startswith(b"{"):
                continue
            chunk = json.loads(data)
            for part in (chunk, *chunk["choices"]):
                prompt = part.pop("prompt_token_ids", None) or prompt
            sampled += sum(len(choice.get("token_ids") or []) for choice in chunk["choices"])
            if any(choice.get("finish_reason") for choice in chunk["choices"]):
                chunk["prompt_token_ids"] = prompt
            if continuous and chunk["choices"]:
                counted = len(prompt) + self.miscounts
                chunk["usage"] = {"prompt_tokens": counted, "completion_tokens": sampled, "total_tokens": counted + sampled}
            if lifetime is not None and sent >= lifetime:
                await response.write(b'data: {"error":{"message":"worker died","type":"Service Unavailable","code":503}}\n\n')
                break
            sent += 1
            await response.write(b"data: " + json.dumps(_as_dynamo(chunk, fields, whole=False)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def _refusal(body, fields, ids):
    if refused := sorted(REFUSED & {*body}):
        return _error(400, f"Validation: Unsupported parameter(s): `{refused[0]}`")
    if body["model"] != "sim":
        return _error(404, "Model not found")
    if body.get("n", 1) != 1 and "completion_token_ids" in fields:
        return _error(400, "Validation: it requires exactly one generated choice")
    if not all(map(_is_object, _arguments(body))):
        return _error(400, "Validation: `function.arguments` must be a valid JSON object string")
    return _error(400, "Invalid request") if ids is not None and max(ids) >= VOCABULARY else None


def _arguments(body):
    calls = [call for message in body.get("messages", ()) for call in message.get("tool_calls") or ()]
    return [call["function"]["arguments"] for call in calls]


def _is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _as_dynamo(reply, fields, *, whole):
    """A reply or a chunk of vLLM's as the frontend writes it: ids in `nvext`, and `reasoning_content`."""
    extension = {}
    prompt = reply.pop("prompt_token_ids", None)
    for choice in reply["choices"]:
        sampled, prompt = choice.pop("token_ids", None), choice.pop("prompt_token_ids", None) or prompt
        part = choice.get("message" if whole else "delta")
        if part and "reasoning" in part:
            part["reasoning_content"] = part.pop("reasoning")
        if sampled and "completion_token_ids" in fields:
            extension["completion_token_ids"] = sampled
    if prompt and "prompt_token_ids" in fields:
        extension["prompt_token_ids"] = prompt
    if "worker_id" in fields:
        extension["worker_id"] = {"decode_worker_id": 7}
    choices = reply.pop("choices")
    return {"id": reply.pop("id"), "choices": choices, **reply, **({"nvext": extension} if extension else {})}


def _error(status, message):
    return web.json_response({"message": message, "type": "Bad Request", "code": status}, status=status)

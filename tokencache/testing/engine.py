r"""Simulates a vLLM server without a model: the same routes and bytes, scripted replies, and a log of every token.

    async with SimulatedEngine(episodes={"demo": ["<think>\n\n</think>\n\nHello."]}).serve() as url:
        ...                       # any OpenAI client at f"{url}/v1"
        engine.ground_truth       # prompt and completion ids of every call

It replies as vLLM 0.32 does with `--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3` and a template like
Qwen3's, in one process, without a GPU, in milliseconds per turn. A test controls what a real engine leaves to chance: replies are known
beforehand, their ids always differ from the canonical tokenization, and faults happen when a test requests them.

To run it as a process: `python -m tokencache.testing.engine --port 8000 --episodes episodes.json`.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from aiohttp import web

from tokencache.testing import wire
from tokencache.testing.chat_request import ChatRequest, check_types, read_chat_request, read_json
from tokencache.testing.completion import ChatCompletion, Completion, CompletionSettings, TextCompletion, read_text_request
from tokencache.testing.derender import derendered, derendered_chunk, rendered
from tokencache.testing.dev_mode import DevMode
from tokencache.testing.errors import RefusalResponse, room_for_reply, schema_refusal, senseless, unknown_model
from tokencache.testing.faults import Fault, FaultKind, FaultOrders
from tokencache.testing.generate_route import GENERATE, GeneratedCompletion, read_generate_request
from tokencache.testing.generation import LogprobsMode
from tokencache.testing.ground_truth import GroundTruthEntry, GroundTruthLog
from tokencache.testing.prompt import media_parts, prompt_ids
from tokencache.testing.replies import ReplyGenerator
from tokencache.testing.responses import empty_response, fail_request, json_response, refuse, stream_refusal, stream_reply
from tokencache.testing.tokenizer import build_tokenizer
from tokencache.testing.weights import SimulatedWeights

Kind = TypeVar("Kind", bound=Completion)

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_MAX_BODY = 256 * 1024 * 1024


class SimulatedEngine:
    """An engine with its settings, faults and ground truth. Attributes may be read and changed while it serves.

    Args:
        episodes: replies by name; see `replies`.
        model: name of the model.
        seed: seed of all random choices.
        drift: probability that a token is split into two.
        max_model_len: tokens.
        honours_ids: whether it uses supplied prompt ids. vLLM before 0.27 ignores them silently.
        derenders: whether it serves `render` and `derender`, as vLLM does with `--enable-scale-out`.
        strict_arguments: whether it refuses a history with tool-call arguments that are not JSON, as older releases did.
        reads_earlier_thoughts: whether its reasoning parser takes the end of an earlier thought for that of the next reply's, as vLLM's
            `deepseek_r1` does.
        reasoning_parser: false for vLLM without `--reasoning-parser`, which leaves `<think>…</think>` in the text.
        token_delay: seconds for each token.
        chunk_tokens: tokens in each chunk of a stream.
        version: the version of vLLM that it reports.
        logprobs_mode: vLLM's option of that name.
        dev_mode: whether it has the routes with which a trainer replaces weights; see `dev_mode`.
        choose_fault: receives the route and body of each request and returns a fault. It is used before the queue `faults`.
        eos: the token at which it stops by itself. A base model's is `<|endoftext|>`, which its template does not write.
        journal: file that receives every token before it is sent; see `ground_truth`.
        orders: receives faults over HTTP; used instead of `choose_fault`.

    Attributes:
        ground_truth: one entry for each generation.
        weights: the weights, LoRA adapters and prefix cache.
        dev_mode: how it is paused, and what its trainer called.
        requests, headers: bodies and headers of the chat completion requests received, including refused ones.
        completions, derendered, generated, tokenizations: bodies of the text completion, `derender`, `/inference/v1/generate` and
            `/tokenize` requests received.
        faults: queue of faults. Each happens to one request; `None` lets one request pass.
    """

    def __init__(
        self,
        *,
        episodes: Mapping[str, Sequence[str]] | None = None,
        model: str = "sim",
        seed: int = 0,
        drift: float = 0.3,
        max_model_len: int = 131072,
        honours_ids: bool = True,
        derenders: bool = False,
        strict_arguments: bool = False,
        reasoning_parser: bool = True,
        reads_earlier_thoughts: bool = False,
        token_delay: float = 0.0,
        chunk_tokens: int = 1,
        version: str = "0.32.0",
        logprobs_mode: LogprobsMode = "raw_logprobs",
        dev_mode: bool = False,
        choose_fault: Callable[[str, dict[str, Any]], Fault | None] | None = None,
        eos: str = "<|im_end|>",
        journal: Path | None = None,
        orders: FaultOrders | None = None,
    ) -> None:
        self.tokenizer = build_tokenizer()
        self.model, self.version = model, version
        self.max_model_len = max_model_len
        self.honours_ids, self.derenders = honours_ids, derenders
        self.strict_arguments, self.reasoning_parser = strict_arguments, reasoning_parser
        self.reads_earlier_thoughts = reads_earlier_thoughts
        self.token_delay, self.chunk_tokens = token_delay, chunk_tokens
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self.replies = ReplyGenerator(self.tokenizer, episodes or {}, seed, drift, eos=self.tokenizer.id_of(eos))
        self.choose_fault = orders or choose_fault
        self._orders = orders
        self._log = GroundTruthLog(journal) if journal is not None else None
        self.faults: deque[Fault | None] = deque()
        self.ground_truth: list[GroundTruthEntry] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.completions: list[dict[str, Any]] = []
        self.derendered: list[dict[str, Any]] = []
        self.generated: list[dict[str, Any]] = []
        self.tokenizations: list[dict[str, Any]] = []
        self._paused = False
        self._pauses = 0
        self._running: list[Completion] = []
        self.weights = SimulatedWeights()
        self._has_dev_mode = dev_mode
        self.dev_mode = DevMode(self.weights, self._abort_all, self._count_running)
        self._calls = itertools.count()
        self._changed = asyncio.Event()
        self._started = int(time.time())

    @contextlib.asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Serve while the context is open. Yields the base URL, without `/v1`. Port 0 picks a free port."""
        runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait until `condition` returns true. It is checked whenever a request arrives, starts to generate, or ends.

        Raises:
            TimeoutError: it is still false after `seconds`.
        """
        async with asyncio.timeout(seconds):
            while not condition():
                await self._changed.wait()

    def pause(self) -> None:
        """Abort running generations and refuse requests with 503 until `resume`, as `/pause?mode=abort` of vLLM 0.33 does."""
        self._paused, self._pauses = True, self._pauses + 1

    def resume(self) -> None:
        """Accept requests again."""
        self._paused = False

    def _abort_all(self) -> None:
        self._pauses += 1

    def _count_running(self) -> int:
        return sum(not completion.queued for completion in self._running)

    def _notify(self) -> None:
        """Wake up every `until`."""
        self.dev_mode.notify()
        self._changed.set()
        self._changed = asyncio.Event()

    def app(self) -> web.Application:
        """Return an aiohttp application for this engine."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[refuse])
        app.add_routes([
            web.get("/health", empty_response), web.get("/ping", empty_response), web.post("/ping", empty_response),
            web.get("/version", self._version), web.get("/v1/models", self._models), web.get("/books", self._books),
            web.post("/tokenize", self._tokenize), web.post("/detokenize", self._detokenize),
            web.post(_CHAT, self._chat), web.post(_TEXT, self._complete),
        ])  # fmt: skip
        if self._has_dev_mode:
            app.add_routes(self.dev_mode.routes())
        if self._orders is not None:
            app.add_routes(self._orders.routes())
        if self.derenders:
            app.add_routes([web.post(f"{_CHAT}/derender", self._derender), web.post(f"{_CHAT}/render", self._render_only)])
            app.add_routes([web.post(GENERATE, self._generate)])
        return app

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": self.version})

    async def _models(self, _: web.Request) -> web.Response:
        return json_response(wire.model_list(self.model, self._started, self.max_model_len, self.weights.adapters))

    async def _books(self, _: web.Request) -> web.Response:
        return json_response(self.ground_truth)

    async def _tokenize(self, http: web.Request) -> web.StreamResponse:
        body = read_json(await http.read(), http.content_type)
        self.tokenizations.append(body)
        if (fault := self._next_fault("/tokenize", body)) is not None:
            return await fail_request(http, fault)
        check_types(body)
        self._check_model(body)
        if "messages" not in body and "prompt" not in body:
            raise schema_refusal("body.prompt", "missing", "Field required", body)
        if body.get("continue_final_message") and body.get("add_generation_prompt", True):
            raise senseless("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if "messages" in body:
            arguments = body.get("chat_template_kwargs") or {}
            supplied = self._supplied_ids(body)
            ids = self._render(body, arguments) if supplied is None else supplied
        else:
            ids = self.tokenizer.encode(str(body["prompt"]))
        strings = [self.tokenizer.token(token_id) for token_id in ids] if body.get("return_token_strs") else None
        return json_response({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": strings})

    async def _detokenize(self, http: web.Request) -> web.Response:
        body = read_json(await http.read(), http.content_type)
        self._check_model(body)
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise schema_refusal("body.tokens", "list_type", "Input should be a valid list", tokens)
        for i, token in enumerate(tokens):
            if type(token) is not int or token < 0:
                raise schema_refusal(
                    f"body.tokens.{i}", "greater_than_equal", "Input should be greater than or equal to 0", token, {"ge": 0}
                )
        return json_response({"prompt": self.tokenizer.decode(tokens)})

    async def _derender(self, http: web.Request) -> web.StreamResponse:
        body = read_json(await http.read(), http.content_type)
        self.derendered.append(body)
        self._notify()
        if (fault := self._next_fault(f"{_CHAT}/derender", body)) is not None:
            return await fail_request(http, fault)
        self._check_model(body)
        request = read_chat_request(body["chat_request"], http.headers, served=self.model, vocabulary=self.tokenizer.vocabulary_size)
        if body.get("stream"):
            return json_response(derendered_chunk(request, body, self.tokenizer))
        return json_response(derendered(request, body["generate_response"], self.tokenizer))

    async def _render_only(self, http: web.Request) -> web.StreamResponse:
        body = read_json(await http.read(), http.content_type)
        if (fault := self._next_fault(f"{_CHAT}/render", body)) is not None:
            return await fail_request(http, fault)
        self._check_model(body)
        request = read_chat_request(body, http.headers, served=self.model, vocabulary=self.tokenizer.vocabulary_size)
        return json_response(self._rendered(request))

    def _rendered(self, request: ChatRequest) -> dict[str, Any]:
        return rendered(request, self._render(request.body, request.template_arguments), self.max_model_len)

    def _check_model(self, body: Mapping[str, Any]) -> None:
        if body.get("model") not in (None, self._served(body)):
            raise unknown_model(body["model"], self.model)

    def _served(self, body: Mapping[str, Any]) -> str:
        """The name of the served model that a request names: an adapter's, or the model's own."""
        named = body.get("model")
        return named if isinstance(named, str) and named in self.weights.adapters else self.model

    def _render(self, body: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[int]:
        """Return the ids of a conversation."""
        return prompt_ids(self.tokenizer, body, arguments, model=self.model, strict_arguments=self.strict_arguments)

    def _supplied_ids(self, body: Mapping[str, Any]) -> list[int] | None:
        """Return the prompt ids supplied with the request if this engine uses them. Malformed ones are refused, as in vLLM 0.32."""
        ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if ids is None or not self.honours_ids or body.get("echo") or media_parts(body["messages"]):
            return None
        name = "kv_transfer_params.prompt_token_ids"
        if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int} or min(ids) < 0:
            raise senseless("`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.", name)
        if max(ids) >= self.tokenizer.vocabulary_size:
            raise senseless(f"Token id {max(ids)} is out of vocabulary", name)
        return ids

    def _next_fault(self, route: str, body: dict[str, Any]) -> Fault | None:
        chosen = self.choose_fault(route, body) if self.choose_fault is not None else None
        if chosen is not None:
            return chosen
        for place, fault in enumerate(self.faults):
            if (fault.path if fault is not None else _CHAT) == route:
                del self.faults[place]
                return fault
        return None

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = read_json(await http.read(), http.content_type)
        self.requests.append(body)
        self.headers.append(dict(http.headers))
        return await self._answer(http, _CHAT, body, self._begin_chat)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        body = read_json(await http.read(), http.content_type)
        self.completions.append(body)
        return await self._answer(http, _TEXT, body, self._begin_text)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = read_json(await http.read(), http.content_type)
        self.generated.append(body)
        return await self._answer(http, GENERATE, body, self._begin_generate)

    async def _answer(self, http: web.Request, route: str, body: dict[str, Any], begin: Callable[..., Completion]) -> web.StreamResponse:
        """Send the completion that `begin` makes from body and headers, or carry out a fault."""
        self._notify()
        fault = self._next_fault(route, body)
        if fault is not None and (fault.kind in (FaultKind.STATUS, FaultKind.HANG) or (fault.kind is FaultKind.CLOSE and not fault.after)):
            return await fail_request(http, fault)
        if self._paused:
            raise RefusalResponse("The engine is paused.", kind="ServiceUnavailableError", status=503)
        try:
            completion = begin(body, http.headers)
        except RefusalResponse as refusal:
            if refusal.by_engine and body.get("stream"):
                return await stream_refusal(http, refusal)
            raise
        completion.halted = self._halting(fault)
        completion.queued = bool(self.dev_mode.paused)
        self._running.append(completion)
        try:
            if completion.request.stream:
                return await stream_reply(http, completion, fault)
            raw = msgspec.json.encode(await completion.whole())
        except BaseException:
            completion.abort()
            raise
        finally:
            self._running.remove(completion)
            self._notify()
        if fault is not None and fault.kind is FaultKind.TRUNCATED:
            raw = raw[: len(raw) // 2]
        return web.Response(body=raw, content_type="application/json", headers=completion.headers)

    def _halting(self, fault: Fault | None) -> Callable[[int], bool]:
        pauses = self._pauses
        after = fault.after if fault is not None and fault.kind is FaultKind.ABORT else None
        return lambda tokens: self._pauses > pauses or (after is not None and tokens >= after)

    def _settings(self) -> CompletionSettings:
        return CompletionSettings(
            tokenizer=self.tokenizer,
            replies=self.replies,
            weights=self.weights,
            dev_mode=self.dev_mode,
            chunk_tokens=self.chunk_tokens,
            token_delay=self.token_delay,
            logprobs_mode=self.logprobs_mode,
            reasoning_parser=self.reasoning_parser,
            reads_earlier_thoughts=self.reads_earlier_thoughts,
            log=self._log,
        )

    def _begin_text(self, body: dict[str, Any], headers: Mapping[str, str]) -> Completion:
        request, prompts = read_text_request(body, headers, self.tokenizer, served=self._served(body))
        return self._begun(TextCompletion, request, prompts)

    def _begin_generate(self, body: dict[str, Any], headers: Mapping[str, str]) -> Completion:
        request = read_generate_request(body, headers, self.tokenizer, served=self._served(body))
        return self._begun(GeneratedCompletion, request, [list(body["token_ids"])])

    def _begin_chat(self, body: dict[str, Any], headers: Mapping[str, str]) -> Completion:
        request = read_chat_request(body, headers, served=self._served(body), vocabulary=self.tokenizer.vocabulary_size)
        supplied = self._supplied_ids(request.body)
        ids = self._render(request.body, request.template_arguments) if supplied is None else supplied
        completion = self._begun(ChatCompletion, request, [ids], supplied=supplied is not None, rendered=supplied is None)
        if request.body.get("return_prompt_text"):
            completion.prompt_text = self.tokenizer.decode(self._render(request.body, request.template_arguments))
        return completion

    def _begun(
        self, kind: type[Kind], request: ChatRequest, prompts: list[list[int]], *, supplied: bool = True, rendered: bool = True
    ) -> Kind:
        """Begin a completion of prompts. `supplied`: their ids came with the request; `rendered` as in `room_for_reply`."""
        limits = [room_for_reply(len(ids), request.max_tokens, self.max_model_len, rendered=rendered) for ids in prompts]
        entries = self._new_entries(request, prompts, supplied=supplied)
        return kind(request, prompts, limits, entries, next(self._calls), self._settings())

    def _new_entries(self, request: ChatRequest, prompts: Sequence[Sequence[int]], *, supplied: bool) -> list[GroundTruthEntry]:
        """Add one entry to the ground truth for each choice of each prompt."""
        entries = [
            GroundTruthEntry(request.request_id, i, request.session, request.model, request.stream, supplied, list(prompts[i // request.n]))
            for i in range(len(prompts) * request.n)
        ]
        self.ground_truth.extend(entries)
        self._notify()
        return entries


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an engine until interrupted. Prints its base URL on a line of its own once it serves."""
    parser = argparse.ArgumentParser(prog="python -m tokencache.testing.engine", description="A simulated vLLM engine.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0, the default, picks a free port")
    parser.add_argument("--episodes", type=Path, help="JSON file that maps names to lists of replies")
    parser.add_argument("--model", default="sim", help="name of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drift", type=float, default=0.3, help="probability that a token is split into two")
    parser.add_argument("--max-model-len", type=int, default=131072, help="tokens")
    parser.add_argument("--token-delay", type=float, default=0.0, help="seconds")
    parser.add_argument("--chunk-tokens", type=int, default=1, help="tokens in each chunk of a stream")
    parser.add_argument("--ignore-ids", action="store_true", help="ignore supplied prompt ids, as vLLM before 0.27 does")
    parser.add_argument("--logprobs-mode", default="raw_logprobs", choices=get_args(LogprobsMode), help="as vLLM's option")
    parser.add_argument("--repeatable", action="store_true", help="sample the same tokens for the same prompt")
    parser.add_argument("--journal", type=Path, help="file that receives every token before it is sent")
    parser.add_argument("--dev-mode", action="store_true", help="have the routes with which a trainer replaces weights")
    parser.add_argument("--enable-scale-out", action="store_true", help="serve render and derender, as vLLM with this option")
    parser.add_argument("--control", action="store_true", help="accept faults over HTTP: POST /control/faults")
    options = parser.parse_args(arguments)
    same = ("model", "seed", "drift", "max_model_len", "token_delay", "chunk_tokens", "logprobs_mode", "dev_mode", "journal")
    engine = SimulatedEngine(
        episodes=json.loads(options.episodes.read_text(encoding="utf-8")) if options.episodes else None,
        honours_ids=not options.ignore_ids,
        derenders=options.enable_scale_out,
        orders=FaultOrders() if options.control else None,
        **{name: getattr(options, name) for name in same},
    )
    engine.replies.repeatable = options.repeatable
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(engine, options.host, options.port))


async def _serve(engine: SimulatedEngine, host: str, port: int) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with engine.serve(host, port) as url:
        print(url, flush=True)  # noqa: T201 - what the caller waits for
        await stopped.wait()


if __name__ == "__main__":
    main()

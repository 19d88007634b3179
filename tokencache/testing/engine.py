r"""A vLLM server without a model: the real one's routes and bytes, scripted replies, and books of what truly happened.

    async with SimulatedEngine(episodes={"demo": ["<think>\n\n</think>\n\nHello."]}).serve() as url:
        ...                       # any OpenAI client at f"{url}/v1"
        engine.books              # the ids that went in and came out, whoever asked for them

It answers as vLLM 0.32 with `--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3` and a Qwen3-like
template does, one process, no GPU, milliseconds per turn. What is different from a real engine is what makes tests hard
there: replies are known beforehand, they always drift from the canonical tokenization, faults come to order.

As a process of its own: `python -m tokencache.testing.engine --port 8000 --episodes episodes.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tokencache.testing import wire
from tokencache.testing.books import BookEntry
from tokencache.testing.chat_request import check_types, read_chat_request, read_json
from tokencache.testing.completion import Completion
from tokencache.testing.conversation import has_media, prompt_ids
from tokencache.testing.delivery import empty_answer, fail_request, json_answer, refuse, stream_refusal, stream_reply
from tokencache.testing.derender import derendered, rendered
from tokencache.testing.extras import EngineExtras
from tokencache.testing.faults import Fault, FaultKind
from tokencache.testing.journal import Journal
from tokencache.testing.refusals import RefusalResponse, room_for_reply, schema_refusal, senseless, unknown_model
from tokencache.testing.speech import Speech
from tokencache.testing.text_completion import TextCompletion, read_text_request
from tokencache.testing.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from tokencache.testing.control import Orders
    from tokencache.testing.extras import VersionStyle
    from tokencache.testing.generation import LogprobsMode

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_MAX_BODY = 256 * 1024 * 1024


class SimulatedEngine:
    """One engine with its settings, faults and books; the attributes may be read and changed while it serves."""

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
        token_delay: float = 0.0,
        chunk_tokens: int = 1,
        version: str = "0.32.0",
        logprobs_mode: LogprobsMode = "raw_logprobs",
        weight_versions: VersionStyle = "",
        routed_experts: tuple[int, int] | None = None,
        choose_fault: Callable[[str, dict[str, Any]], Fault | None] | None = None,
        journal: Path | None = None,
        orders: Orders | None = None,
    ) -> None:
        """Set up an engine that is not serving yet.

        `episodes`: name to replies, see `speech`. `drift`: probability of each token to be said in two pieces.
        `max_model_len`: tokens. `honours_ids`: false for vLLM before 0.27, which ignores supplied prompt ids without a
        word. `derenders`: whether it answers `derender` and `render`, as vLLM does with `--enable-scale-out`.
        `strict_arguments`: refuse history whose tool-call arguments are not JSON, as older releases did.
        `reasoning_parser`: false for vLLM without `--reasoning-parser`, which leaves `<think>…</think>` in the text.
        `token_delay`: seconds. `logprobs_mode`: as vLLM's option. `weight_versions`: how it says them, see `extras`;
        `routed_experts`: its layers and the experts chosen in each, of which it then tells. `choose_fault`: asked with route and
        body for each request, before the queue `faults`. `journal`: a file in which the books are kept, too (see `journal`).
        `orders`: take faults over HTTP (see `control`), in place of `choose_fault`.
        """
        self.tokenizer = build_tokenizer()
        self.model, self.version = model, version
        self.max_model_len = max_model_len
        self.honours_ids, self.derenders = honours_ids, derenders
        self.strict_arguments, self.reasoning_parser = strict_arguments, reasoning_parser
        self.token_delay, self.chunk_tokens = token_delay, chunk_tokens
        self.logprobs_mode: LogprobsMode = logprobs_mode
        self.extras = EngineExtras(weight_versions, routed_experts)
        self.speech = Speech(self.tokenizer, episodes or {}, seed, drift)
        self.choose_fault = orders or choose_fault
        self._orders = orders
        self._journal = Journal(journal) if journal is not None else None
        self.faults: deque[Fault | None] = deque()
        self.books: list[BookEntry] = []
        self.requests: list[dict[str, Any]] = []
        """Bodies of the chat completion requests received, refused ones too."""
        self.headers: list[dict[str, str]] = []
        """Headers of the same requests."""
        self.completions: list[dict[str, Any]] = []
        """Bodies of the text completion requests received."""
        self.derendered: list[dict[str, Any]] = []
        """Bodies of the derender requests received."""
        self.tokenizations: list[dict[str, Any]] = []
        """Bodies of the /tokenize requests received."""
        self._paused = False
        self._pauses = 0
        self._calls = itertools.count()
        self._news = asyncio.Event()
        self._started = int(time.time())

    @contextlib.asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Serve until the block is left; yields the base URL, without `/v1`. Port 0 takes a free one."""
        runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait until `condition` holds; it is asked again whenever a request came in, began to generate, or ended.

        Raises TimeoutError after `seconds`. For tests that would otherwise sleep and hope.
        """
        async with asyncio.timeout(seconds):
            while not condition():
                await self._news.wait()

    def pause(self) -> None:
        """As `/pause?mode=abort` of vLLM 0.33: what is being generated is aborted, and who asks gets 503 until `resume`."""
        self._paused, self._pauses = True, self._pauses + 1

    def resume(self) -> None:
        """Take calls again."""
        self._paused = False

    def _tell(self) -> None:
        """Wake up everyone who waits for news."""
        self._news.set()
        self._news = asyncio.Event()

    def app(self) -> web.Application:
        """Return an aiohttp application for this engine."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[refuse])
        app.add_routes([
            web.get("/health", empty_answer), web.get("/ping", empty_answer), web.post("/ping", empty_answer),
            web.get("/version", self._version), web.get("/v1/models", self._models), web.get("/books", self._books),
            web.post("/tokenize", self._tokenize), web.post("/detokenize", self._detokenize),
            web.post(_CHAT, self._chat), web.post(_TEXT, self._complete),
        ])  # fmt: skip
        if self._orders is not None:
            app.add_routes(self._orders.routes())
        if self.derenders:
            app.add_routes([web.post(f"{_CHAT}/derender", self._derender), web.post(f"{_CHAT}/render", self._render_only)])
        return app

    async def _version(self, _: web.Request) -> web.Response:
        return json_answer({"version": self.version})

    async def _models(self, _: web.Request) -> web.Response:
        return json_answer(wire.model_list(self.model, self._started, self.max_model_len))

    async def _books(self, _: web.Request) -> web.Response:
        return json_answer(self.books)

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
        return json_answer({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": strings})

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
        return json_answer({"prompt": self.tokenizer.decode(tokens)})

    async def _derender(self, http: web.Request) -> web.StreamResponse:
        body = read_json(await http.read(), http.content_type)
        self.derendered.append(body)
        self._tell()
        if (fault := self._next_fault(f"{_CHAT}/derender", body)) is not None:
            return await fail_request(http, fault)
        self._check_model(body)
        request = read_chat_request(body["chat_request"], http.headers, served=self.model, vocabulary=self.tokenizer.vocabulary_size)
        return json_answer(derendered(request, body["generate_response"], self.tokenizer))

    async def _render_only(self, http: web.Request) -> web.StreamResponse:
        body = read_json(await http.read(), http.content_type)
        if (fault := self._next_fault(f"{_CHAT}/render", body)) is not None:
            return await fail_request(http, fault)
        self._check_model(body)
        request = read_chat_request(body, http.headers, served=self.model, vocabulary=self.tokenizer.vocabulary_size)
        return json_answer(rendered(request, self._render(body, request.template_arguments), self.max_model_len))

    def _check_model(self, body: Mapping[str, Any]) -> None:
        if body.get("model") not in (None, self.model):
            raise unknown_model(body["model"], self.model)

    def _render(self, body: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[int]:
        return prompt_ids(self.tokenizer, body, arguments, model=self.model, strict_arguments=self.strict_arguments)

    def _supplied_ids(self, body: Mapping[str, Any]) -> list[int] | None:
        """Return the prompt ids that come with the request, if this engine goes by them; 400 as from vLLM 0.32 on if malformed."""
        ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if ids is None or not self.honours_ids or body.get("echo") or has_media(body["messages"]):
            return None
        name = "kv_transfer_params.prompt_token_ids"
        if not isinstance(ids, list) or not ids or any(type(token_id) is not int or token_id < 0 for token_id in ids):
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

    async def _answer(
        self, http: web.Request, route: str, body: dict[str, Any], begin: Callable[..., Completion | TextCompletion]
    ) -> web.StreamResponse:
        """Answer with what `begin` makes of the body and the headers, or as a fault has it."""
        self._tell()
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
        if isinstance(completion, Completion):
            completion.halted = self._halting(fault)
        try:
            if completion.request.stream:
                return await stream_reply(http, completion, fault)
            raw = wire.encode(await completion.whole())
        except BaseException:
            completion.abort()
            raise
        finally:
            self._tell()
        if fault is not None and fault.kind is FaultKind.TRUNCATED:
            raw = raw[: len(raw) // 2]
        return web.Response(body=raw, content_type="application/json", headers=completion.extras.headers)

    def _halting(self, fault: Fault | None) -> Callable[[int], bool]:
        pauses = self._pauses
        after = fault.after if fault is not None and fault.kind is FaultKind.ABORT else None
        return lambda tokens: self._pauses > pauses or (after is not None and tokens >= after)

    def _manner(self) -> dict[str, Any]:
        """How a completion goes out."""
        delay = {"chunk_tokens": self.chunk_tokens, "token_delay": self.token_delay}
        kept = {"keep": self._journal.keep} if self._journal is not None else {}
        return delay | kept | {"mode": self.logprobs_mode, "extras": self.extras}

    def _begin_text(self, body: dict[str, Any], headers: Mapping[str, str]) -> TextCompletion:
        """Tokenize the prompts, check that there is room, open the books: one entry for each choice of each prompt."""
        request, prompts = read_text_request(body, headers, self.tokenizer, served=self.model)
        limits = [room_for_reply(len(ids), request.max_tokens, self.max_model_len, rendered=True) for ids in prompts]
        entries = [
            BookEntry(request.request_id, i, request.session, request.model, request.stream, True, list(prompts[i // request.n]))
            for i in range(len(prompts) * request.n)
        ]
        self.books.extend(entries)
        self._tell()
        call = next(self._calls)
        return TextCompletion(request, prompts, entries, self.tokenizer, self.speech, limits, call, **self._manner())

    def _begin_chat(self, body: dict[str, Any], headers: Mapping[str, str]) -> Completion:
        """Find the prompt, check that there is room for a reply, open the books."""
        request = read_chat_request(body, headers, served=self.model, vocabulary=self.tokenizer.vocabulary_size)
        supplied = self._supplied_ids(request.body)
        ids = self._render(request.body, request.template_arguments) if supplied is None else supplied
        limit = room_for_reply(len(ids), request.max_tokens, self.max_model_len, rendered=supplied is None)
        entries = [
            BookEntry(request.request_id, i, request.session, request.model, request.stream, supplied is not None, list(ids))
            for i in range(request.n)
        ]
        self.books.extend(entries)
        self._tell()
        call = next(self._calls)
        how = self._manner() | {"reasoning_parser": self.reasoning_parser}
        return Completion(request, ids, entries, self.tokenizer, self.speech, limit, call, **how)


if __name__ == "__main__":
    from tokencache.testing.cli import main

    main()

"""Runs the proxy without HTTP, with an engine in this process.

A request takes the same steps as in `proxy.endpoints` and `proxy.call`: codec, keys, store, plan, engine, record, ledger, encoder. All of
that is the product's code. The engine is not: it takes the exact ids or renders the request itself, "samples" ids for the reply that
the test chose, answers as vLLM does, and keeps a ground-truth log of its input and output.

    stack = Stack("Qwen3", seed=1)
    called = await stack.call("session", body, {"content": "Hello."})
    called.plan.match, called.prompt, called.completion, called.turn, called.answer
"""

from __future__ import annotations

import functools
import json
import random
import re
import struct
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from multidict import CIMultiDict

from tests.engine.template.more_kinds import ALL_KINDS
from tests.engine.template.template_lab import Kind, Lab, Vocabulary, _compiled, own_stop, speech
from tokencache.core import ids
from tokencache.core.rules import Leniency
from tokencache.dialects.base import DialectRequest, ModelCall, ReplyEncoder
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.reply import ChatReplyEncoder
from tokencache.dialects.chat.request import ChatCall, read_chat, with_messages
from tokencache.dialects.chat.vocabulary import as_reminders
from tokencache.dialects.registry import dialect_of
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.reply import Reply
from tokencache.engine.template.edited import EditedHistories
from tokencache.engine.template.learned import LearnedTemplate
from tokencache.engine.template.renderer import TemplateRefusedError
from tokencache.engine.template.tails import Tails
from tokencache.engine.template.visible import VisibleReplies
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.planner import Plan, Planner, keys_wanted
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.proxy.recorder import Outcome
from tokencache.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokencache.core.session import History
    from tokencache.core.turn import Turn
    from tokencache.dialects.chat.rendering import RenderArgs

MODEL = "m"
PATHS = {
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "gemini": f"/v1beta/models/{MODEL}:generateContent",
}
LENIENT = Leniency()
_RENDERED = ("chat_template_kwargs", "reasoning_effort", "documents")

Message = dict[str, Any]


class RefusedError(Exception):
    """The engine refuses a request, as vLLM does with a 400."""


class Renderer(Lab):
    """The engine's `/tokenize` and `/detokenize`: a `Lab` that accepts all JSON that Python accepts, and refuses what cannot be rendered.

    Templates run without jinja's sandbox, which takes half of the time: these are ours.
    """

    def compiled(self) -> jinja2.Template:
        """See `Lab.compiled`."""
        return _unboxed(self.template)

    async def render(self, model: str, messages: Sequence[bytes], args: RenderArgs, *, generation: bool) -> bytes:
        """See `Renderer.render`."""
        self.rendered.append(len(messages))
        try:
            tools = json.loads(bytes(args.tools)) if args.tools is not None else None
            text = self.prompt([_read(bytes(raw)) for raw in messages], tools, args.kwargs, generation=generation)
            return ids.pack(self.encode(text))
        except RefusedError as why:
            raise TemplateRefusedError(str(why)) from why

    def encode(self, text: str) -> list[int]:
        """Tokenize. Each text between two added tokens is tokenized separately and remembered, because histories repeat."""
        return [token for piece in _between(self.words).split(text) if piece for token in _piece(self.words, piece)]

    async def read(self, model: str, packed: bytes) -> str:
        """See `EngineRenderer.read`."""
        return self.words.decode(ids.unpack(packed))

    def prompt(self, messages: Sequence[Message], tools: Any, kwargs: dict[str, Any], *, generation: bool = True) -> str:
        """The prompt of a conversation as text.

        Raises:
            RefusedError: whatever the template, or the tokenizer, does not take.
        """
        members = ("name", "description", "parameters")
        offered = [{"type": "function", "function": {m: tool["function"].get(m) for m in members}} for tool in tools or ()]
        try:
            text = self.text(list(map(_with_reasoning, messages)), offered or None, generation=generation, **kwargs)
            text.encode()
        except Exception as why:
            raise RefusedError(f"{type(why).__name__}: {why}") from why
        return text


@functools.lru_cache(maxsize=64)
def _unboxed(template: str) -> jinja2.Template:
    """A template with the filters and functions that transformers gives it."""
    boxed = _compiled(template).environment
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False)  # noqa: S701 - no HTML
    environment.filters, environment.globals = boxed.filters, boxed.globals
    return environment.from_string(template)


@functools.lru_cache(maxsize=64)
def _between(words: Vocabulary) -> re.Pattern[str]:
    """A pattern of the added tokens, which are matched before other text."""
    added = sorted((token.content for token in words.backend.get_added_tokens_decoder().values()), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, added))})")


@functools.lru_cache(maxsize=50_000)
def _piece(words: Vocabulary, text: str) -> tuple[int, ...]:
    return tuple(words.encode(text))


@functools.lru_cache(maxsize=20_000)
def _read(raw: bytes) -> Message:
    """A message's JSON as Python reads it; callers must not change the result."""
    return json.loads(raw)


def _with_reasoning(message: Message) -> Message:
    """Chat completions take reasoning under two names."""
    inner = message.get("reasoning_content")
    return {**message, "reasoning": inner} if inner is not None and message.get("reasoning") is None else message


@dataclass
class Called:
    """One call: its plan, what the engine used and sampled, what was recorded, what the client received.

    Of a call that the engine refuses (`refused`), nothing was sampled. `handle` is what the reply carries to be echoed.
    """

    plan: Plan
    call: ChatCall
    renderer: Renderer
    prompt: list[int] = field(default_factory=list)
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn: Turn | None = None
    answer: bytes = b""
    handle: str = ""
    refused: str = ""
    incidents: tuple[str, ...] = ()

    @functools.cached_property
    def messages(self) -> list[Message]:
        """The messages of the request in chat, as the engine reads them."""
        return [_read(bytes(raw)) for raw in self.call.raw_messages]

    def text(self, messages: Sequence[Message] | None = None, *, generation: bool = True) -> str:
        """The prompt that the engine renders for this request, or for other messages."""
        tools, kwargs = _arguments(self.call.fields)
        return self.renderer.prompt(self.messages if messages is None else messages, tools, kwargs, generation=generation)

    @functools.cached_property
    def rendered(self) -> list[int]:
        """The ids of the plain rendering of the same request."""
        return self.renderer.encode(self.text())


@dataclass
class Entry:
    """One generation in the engine's ground-truth log."""

    session: str
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]


class Engine:
    """An engine that renders, samples the given reply, and keeps a ground-truth log. `rng` chooses ids and log probabilities."""

    def __init__(self, kind: Kind, renderer: Renderer, rng: random.Random) -> None:
        self.kind, self.renderer, self._rng = kind, renderer, rng
        self.ground_truth: list[Entry] = []

    def generate(self, session: str, body: dict[str, Any], exact: bytes | None, reply: Message) -> tuple[bytes, Entry]:
        """Answer a chat request.

        Raises:
            RefusedError: it cannot be rendered.
        """
        if exact is None:
            tools, kwargs = _arguments(body)
            text = self.renderer.prompt(body["messages"], tools, kwargs)
            prompt = self.renderer.encode(text)
        else:
            prompt = ids.unpack(exact)
            text = self.renderer.words.decode(prompt[-40:])
        completion = self._sample(text, reply)
        chances = [_float32(-3 * self._rng.random()) for _ in completion]
        entry = Entry(session, prompt, completion, chances)
        self.ground_truth.append(entry)
        return _completion(entry, reply, len(self.ground_truth)), entry

    def _sample(self, prompt: str, reply: Message) -> list[int]:
        """Ids of the reply in the model's own format after this prompt, and a stop id."""
        said = {**reply, "tool_calls": [_sayable(call) for call in reply.get("tool_calls") or ()]}
        text = speech(self.kind, said, prompt).encode("utf-8", "replace").decode()
        stop = [] if reply.get("finish_reason") == "length" else [self.renderer.words.id_of(own_stop(self.kind, said))]
        return self.renderer.words.sampled(text, self._rng) + stop


class Stack:
    """One proxy with one engine; `template` is a name in `more_kinds.ALL_KINDS`.

    With `whole`, it is the real template from the shared folder instead of the stand-in. `seed` decides how replies are spelled in ids.
    """

    def __init__(self, template: str = "Qwen3", *, seed: int = 0, whole: bool = False) -> None:
        self.kind = ALL_KINDS[template]
        self.renderer = Renderer.of(self.kind, shared=whole)
        self.rng = random.Random(seed)
        self.engine = Engine(self.kind, self.renderer, self.rng)
        self.store = MemoryStore()
        self.ledger = Ledger(self.store, PrefixCache(self.store, max_bytes=64 * 2**20))
        self.bodies = IncrementalParser()
        self.bodies.secret = b"a secret of 32 bytes, always one"
        self._planner = Planner(SimpleNamespace(), self.store, self.ledger.prefixes)  # no call here needs the pool
        self._model: Any = None
        self._calls = 0
        self.history: History = "supply"

    async def model(self, name: str = "") -> Any:
        """The model as `Engine.model` returns it, with the stop ids that the product's own probe finds."""
        del name
        if self._model is None:
            stop_ids = await self.renderer.found_stops(self.kind.stops)
            later = {"role": "system", "content": "Later."}
            try:
                self.renderer.prompt([later, _USER, {"role": "assistant", "content": "a"}, later, _USER], None, {})
            except RefusedError:
                later = {}

            async def alike(_: RenderArgs) -> bool:
                return True

            self._model = SimpleNamespace(
                capability=SimpleNamespace(
                    level="exact",
                    tokenizes=True,
                    max_model_len=0,
                    later_system=bool(later),
                    logprobs="raw",
                    images="",
                    placeholder_ids=(),
                    turn_ends=(),
                ),
                driver=Vllm(),
                renderer=self.renderer,
                stop_ids=stop_ids,
                stops_by_itself=bool(stop_ids),
                tails=Tails(template := LearnedTemplate(self.renderer, stop_ids)),
                edited_histories=EditedHistories(template),
                visible_replies=VisibleReplies(template),
                renders_alike=alike,
                observe=lambda _: None,
            )
        return self._model

    async def call(
        self, session: str, body: bytes, reply: Message, *, dialect: str = "chat", leniency: Leniency = LENIENT, handle: str = ""
    ) -> Called:
        """Serve one call, which the model answers with `reply` (an assistant's message as vLLM would parse it).

        Raises:
            HarnessError: the request cannot be read.
        """
        self._calls += 1
        model = await self.model()
        call, encoder, handle = await self._read(session, body, dialect, handle)
        call.leniency, call.history = leniency, self.history
        name, keys = f"call-{self._calls}", keys_wanted(call)
        begun = await self.ledger.begin(session, name, keys)
        plan, _ = await self._planner.plan(self, session, call, keys, begun)  # type: ignore[arg-type]
        called = Called(plan, call, self.renderer, handle=handle)
        heard = Reply(call.n)
        heard.prompt.sent = plan.sent
        try:
            data, entry = self.engine.generate(session, _sent(call), plan.exact.ids if plan.exact is not None else None, reply)
        except RefusedError as why:
            called.refused = str(why)
            await self.ledger.settle(begun, session, name, [])
            return called
        called.prompt, called.completion, called.logprobs = entry.prompt, entry.completion, entry.logprobs
        heard.add(data)
        outcome = Outcome(
            session=session, epoch=begun.epoch if begun else "", call_id=name, call=call, plan=plan, reply=heard, model=model, started=0.0
        )
        recorded = outcome.record(self.ledger.prefixes)
        called.answer = encoder.whole(data)
        await self.ledger.end(begun, outcome, recorded, encoder.documents())
        called.turn = recorded.entries[0].turn if recorded.entries else None
        called.incidents = tuple(incident.kind for incident in recorded.incidents)
        return called

    async def forget(self, session: str) -> None:
        """Delete a session, and its part of the engine's ground-truth log."""
        await self.ledger.delete(session, reuse=True)
        self.engine.ground_truth = [entry for entry in self.engine.ground_truth if entry.session != session]

    async def _read(self, session: str, body: bytes, dialect: str, handle: str) -> tuple[ChatCall, ReplyEncoder, str]:
        if dialect == "chat":
            call = read_chat(body, self.bodies, session)
            return call, ChatReplyEncoder(call), ""

        async def nothing() -> list[Any]:
            return []

        asked = DialectRequest(
            method="POST",
            path=PATHS[dialect],
            query={},
            headers=CIMultiDict(),
            body=body,
            handle=handle or f"{self.rng.getrandbits(128):032x}",
            served=nothing,
            documents=lambda names: self.store.documents(session, names),
            forget=lambda name: self.store.delete_document(session, name),
        )
        codec = dialect_of("POST", asked.path, asked.headers)
        assert codec is not None
        meant = await codec.parse(asked)
        assert isinstance(meant, ModelCall)
        known_as = f"{session}\0{codec.name}"
        call = read_chat(meant.body, self.bodies, known_as)
        later = any(message.role == "system" for message in call.messages[1:])
        if later and not (await self.model()).capability.later_system:
            call = read_chat(with_messages(call, as_reminders(call.raw_messages)), self.bodies, f"{known_as}\0reminders")
        call.dialect, call.handle = codec.name, asked.handle
        call.handles, call.echoes, call.left_out = meant.handles, meant.echoes, meant.left_out
        return call, meant.encoder, asked.handle


_USER: Message = {"role": "user", "content": "What?"}


def _sent(call: ChatCall) -> dict[str, Any]:
    """The members of the request that the engine receives, as Python reads JSON."""
    wanted = ("messages", "tools", *_RENDERED)
    return {name: json.loads(bytes(call.fields[name])) for name in wanted if name in call.fields}


def _arguments(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The tools and template arguments that vLLM takes from a request's members."""
    read = {name: json.loads(bytes(raw)) if isinstance(raw, msgspec.Raw) else raw for name, raw in fields.items() if name != "messages"}
    kwargs = dict(read.get("chat_template_kwargs") or {})
    if read.get("documents") is not None:
        kwargs["documents"] = read["documents"]
    if (effort := read.get("reasoning_effort")) is not None:
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    return read.get("tools"), kwargs


def _sayable(call: Message) -> Message:
    """A call whose arguments `speech` can write: a value that is not an object becomes the value of a member."""
    arguments = call["function"]["arguments"]
    try:
        said = json.loads(arguments)
    except ValueError:
        said = None
    said = said if isinstance(said, dict) else {"raw": arguments}
    return {**call, "function": {**call["function"], "arguments": json.dumps(said)}}


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def _completion(entry: Entry, reply: Message, number: int) -> bytes:
    """The body of vLLM's answer."""
    calls = reply.get("tool_calls") or []
    message = {"role": "assistant", "content": reply.get("content"), "refusal": None, "annotations": None, "audio": None}
    message |= {"function_call": None, "reasoning": reply.get("reasoning")} | ({"tool_calls": calls} if calls else {})
    sampled = zip(entry.completion, entry.logprobs, strict=True)
    said = [{"token": f"token_id:{token}", "logprob": chance, "bytes": None, "top_logprobs": []} for token, chance in sampled]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": {"content": said},
        "finish_reason": reply.get("finish_reason") or ("tool_calls" if calls else "stop"),
        "stop_reason": None,
        "token_ids": entry.completion,
    }
    counted = {"prompt_tokens": len(entry.prompt), "completion_tokens": len(entry.completion)}
    whole = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice]}
    whole |= {"usage": counted | {"total_tokens": sum(counted.values())}, "prompt_token_ids": entry.prompt}
    return msgspec.json.encode(whole)

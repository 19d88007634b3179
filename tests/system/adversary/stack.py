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
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
from multidict import CIMultiDict

from tests.engine.template.more_kinds import ALL_KINDS
from tests.system.adversary.engine import MODEL, Engine, Generation, Message, RefusedError, Renderer, read_message, template_arguments
from tokencache.core.rules import Leniency, ToolNames
from tokencache.core.verdict import CUT_OFF
from tokencache.dialects.base import CallReader, DialectRequest, ParsedCall
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.request import ChatCall, with_messages
from tokencache.dialects.chat.sampling import budget_of
from tokencache.dialects.chat.vocabulary import as_reminders
from tokencache.dialects.registry import dialect_of
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.figures import judge_reply
from tokencache.engine.model import Model
from tokencache.engine.probe import NO_END, PLAIN_ARGS, Capability
from tokencache.engine.reply import Reply
from tokencache.engine.template.boundary import stop_candidates
from tokencache.engine.upstream import Upstream
from tokencache.proxy.facts import BegunCall, CallFacts, PlannedCall
from tokencache.proxy.kv_salt import NO_SALT
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.planner import Planner, keys_wanted
from tokencache.proxy.policy_version import UNREPORTED, VersionReading
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.proxy.recorder import turns_of
from tokencache.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokencache.core.session import History
    from tokencache.core.turn import Turn
    from tokencache.dialects.chat.rendering import RenderArgs
    from tokencache.dialects.reply_encoder import ReplyEncoder
    from tokencache.proxy.plan import Plan
    from tokencache.store.base import BeginResult, Store

PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "gemini": f"/v1beta/models/{MODEL}:generateContent",
}
LENIENT = Leniency()
_SENT = (
    *("messages", "tools", "chat_template_kwargs", "reasoning_effort", "documents", "continue_final_message"),
    *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "thinking_token_budget"),
)


class LabDriver(Vllm):
    """vLLM's driver, with a renderer in this process."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__()
        self._renderer = renderer

    def renderer(self, upstream: Upstream) -> Any:
        """See `Driver.renderer`."""
        return self._renderer


class LabModel(Model):
    """The product's model with known findings; what it learns from replies is the product's."""

    async def renders_alike(self, args: RenderArgs) -> bool:
        """See `Model.renders_alike`."""
        return True


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
    generation: Generation | None = None
    turn: Turn | None = None
    answer: bytes = b""
    handle: str = ""
    refused: str = ""
    incidents: tuple[str, ...] = ()

    @functools.cached_property
    def messages(self) -> list[Message]:
        """The messages of the request in chat, as the engine reads them."""
        return [read_message(bytes(raw)) for raw in self.call.raw_messages]

    def text(self, messages: Sequence[Message] | None = None, *, generation: bool = True, continues: bool = False) -> str:
        """The prompt that the engine renders for this request, or for other messages; with `continues` the last of them is continued."""
        tools, kwargs = template_arguments(self.call.fields)
        if messages is None:
            messages, continues = self.messages, self.continues
        return self.renderer.prompt(messages, tools, kwargs, generation=generation, continues=continues)

    @property
    def continues(self) -> bool:
        """Whether the reply continues the last message."""
        return _sent(self.call).get("continue_final_message", False)

    @functools.cached_property
    def rendered(self) -> list[int]:
        """The ids of the plain rendering of the same request."""
        return self.renderer.encode(self.text())


class Stack:
    """One proxy with one engine; `template` is a name in `more_kinds.ALL_KINDS`.

    With `whole`, it is the real template from the shared folder instead of the stand-in. `seed` decides how replies are spelled in ids.
    `base` and `parses` are those of its `Engine`. Without a `store`, it has one in memory.
    """

    def __init__(
        self,
        template: str = "Qwen3",
        *,
        seed: int = 0,
        whole: bool = False,
        base: bool = False,
        parses: bool = True,
        store: Store | None = None,
    ) -> None:
        self.kind = ALL_KINDS[template]
        self.renderer = Renderer.of(self.kind, shared=whole)
        self.rng = random.Random(seed)
        self.engine = Engine(self.kind, self.renderer, self.rng, base=base, parses=parses)
        self.store = store or MemoryStore()
        self.ledger = Ledger(self.store, PrefixCache(self.store, max_bytes=64 * 2**20))
        self.bodies = IncrementalParser()
        self.bodies.secret = b"a secret of 32 bytes, always one"
        self._planner = Planner(SimpleNamespace(), self.store, self.ledger.prefixes)  # no call here needs the pool
        self._model: LabModel | None = None
        self._calls = 0
        self.history: History = "supply"

    async def model(self, name: str = "") -> LabModel:
        """The model as `Engine.model` returns it, with the stop ids that the product's own probe finds; a base model shows none."""
        del name
        if self._model is None:
            later = {"role": "system", "content": "Later."}
            try:
                self.renderer.prompt([later, _USER, {"role": "assistant", "content": "a"}, later, _USER], None, {})
            except RefusedError:
                later = {}
            ends = await stop_candidates(self.renderer, MODEL, PLAIN_ARGS)
            added = self.renderer.words.backend.get_added_tokens_decoder()
            turn_ends = tuple(token for token in ends.turn_ends if self.renderer.words.decode([token]).strip())
            silent = tuple(token for token in turn_ends if token in added) if self.engine.base else ()
            silent = () if any(token in added for token in ends.after_text[1:]) else silent
            stops = () if self.engine.base else tuple(await self.renderer.found_stops(self.kind.stops))
            capability = Capability(
                model=MODEL,
                level="exact" if stops or silent else "record",
                why="" if stops or silent else NO_END,
                tokenizes=True,
                later_system=bool(later),
                logprobs="raw",
                turn_ends=turn_ends,
                stop_ids=stops,
                silent_ends=silent,
            )
            self._model = LabModel(capability, Upstream("http://127.0.0.1:1"), LabDriver(self.renderer))
        return self._model

    async def call(
        self,
        session: str,
        body: bytes,
        reply: Message,
        *,
        dialect: str = "chat",
        leniency: Leniency = LENIENT,
        handle: str = "",
        breaks: random.Random | None = None,
    ) -> Called:
        """Serve one call, which the model answers with `reply` (an assistant's message as vLLM would parse it).

        With `breaks`, the client leaves a stream within the reply, or the engine breaks it off. The client has received no answer then.

        Raises:
            HarnessError: the request cannot be read.
        """
        self._calls += 1
        model = await self.model()
        call, encoder, handle = await self._read(session, body, dialect, handle)
        call.leniency = msgspec.structs.replace(leniency, tools=ToolNames(call.fields.get("tools")))
        call.history = self.history
        name, keys = f"call-{self._calls}", keys_wanted(call)
        begun = await self.ledger.begin(session, name, keys)
        plan, _ = await self._planner.plan(self, session, call, keys, begun)  # type: ignore[arg-type]
        called = Called(plan, call, self.renderer, handle=handle)
        heard = Reply(call.n)
        heard.prompt.sent = plan.sent
        try:
            exact = plan.exact.ids if plan.exact is not None else None
            data, generation = self.engine.generate(session, _sent(call), exact, reply)
        except RefusedError as why:
            called.refused = str(why)
            await self.ledger.settle(begun, session, name, [])
            return called
        called.prompt, called.completion, called.generation = generation.prompt, generation.completion, generation
        chunks, broken = [data], ""
        if breaks is not None and generation.ends:
            calls, broken = breaks.randrange(0, len(generation.ends)), breaks.choice(sorted(CUT_OFF))
            chunks = self.engine.break_off(generation, calls, breaks) if calls else self.engine.break_off_text(generation, breaks)
            called.completion = generation.completion
        for chunk in chunks:
            heard.add(chunk)
        facts = self._facts(BegunCall(id=name, session=session, chat=call, started=0.0), begun, plan, model, heard, broken=broken)
        recorded = await turns_of(facts, self.ledger.prefixes)
        called.answer = b"" if broken else encoder.whole(data)
        await self.ledger.end(begun, facts, recorded, encoder.documents())
        called.turn = recorded.entries[0].turn if recorded.entries else None
        called.incidents = tuple(incident.kind for incident in recorded.incidents)
        return called

    def _facts(self, call: BegunCall, begun: BeginResult | None, plan: Plan, model: Model, heard: Reply, *, broken: str) -> CallFacts:
        budget, weights = budget_of(call.chat.fields), VersionReading(UNREPORTED, NO_SALT)
        thinking = self.engine.thinking_marks() if budget is not None else None
        planned = PlannedCall(engine=self, model=model, plan=plan, weights=weights, budget=budget, thinking=thinking)  # type: ignore[arg-type]
        judged = judge_reply(heard, broken_off=bool(broken))
        if judged.whole:
            for choice in heard.choices.values():
                model.observe(choice)
        epoch = begun.epoch if begun else ""
        return CallFacts(call=call, epoch=epoch, planned=planned, reply=heard, judged=judged, mark=broken, ended=0.0)

    async def forget(self, session: str) -> None:
        """Delete a session, and its part of the engine's ground-truth log."""
        await self.ledger.delete(session, reuse=True)
        self.engine.ground_truth = [one for one in self.engine.ground_truth if one.session != session]

    async def _read(self, session: str, body: bytes, dialect: str, handle: str) -> tuple[ChatCall, ReplyEncoder, str]:
        async def nothing() -> list[Any]:
            return []

        asked = DialectRequest(
            method="POST",
            path=PATHS[dialect],
            query={},
            headers=CIMultiDict(),
            body=body,
            handle=handle or (f"{self.rng.getrandbits(128):032x}" if dialect != "chat" else ""),
            served=nothing,
            documents=lambda names: self.store.documents(session, names),
            forget=lambda name: self.store.delete_document(session, name),
        )
        codec = dialect_of("POST", asked.path, asked.headers)
        assert codec is not None
        meant = await codec.parse(asked)
        assert isinstance(meant, ParsedCall)
        known_as = f"{session}\0{codec.name}"
        call = await meant.read(asked, meant.body, CallReader(self.bodies, known_as))
        later = meant.reminds and any(message.role == "system" for message in call.messages[1:])
        if later and not (await self.model()).capability.later_system:
            reminders = CallReader(self.bodies, f"{known_as}\0reminders")
            call = await meant.read(asked, with_messages(call, as_reminders(call.raw_messages)), reminders)
        call.dialect = codec.name
        return call, meant.reply_encoder(call), call.handle


_USER: Message = {"role": "user", "content": "What?"}


def _sent(call: ChatCall) -> dict[str, Any]:
    """The members of the request that the engine receives, as Python reads JSON."""
    return {name: json.loads(bytes(call.fields[name])) for name in _SENT if name in call.fields}

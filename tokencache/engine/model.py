"""Keeps the state of one engine: its models, which are probed on first use, and what was learned about their templates.

A model is probed when a call first names it (LoRA adapters share an engine but may have other templates). It is probed again after the
engine could not be reached, because another process may run there now. Each model on an engine has a state:

=============  ========================================================================  ==================================================
state          last finding                                                              next probe
=============  ========================================================================  ==================================================
`unprobed`     none yet, or discarded because the engine was unreachable                 at the next call
`failed`       none: the probe ended with an error                                       after a delay
`lowered`      less than the best level ever found here, or than `--require` asks for    after a delay; calls are served in the meantime
`ready`        sufficient                                                                after it was discarded; if not final, after a delay
=============  ========================================================================  ==================================================

Delays double up to a minute, or up to an hour in the state `ready`. A level below `exact` is not final, nor is a finding after a server
error: the engine may still be starting, or a router in front of it may have lost a route.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

import msgspec

from tokencache import metrics
from tokencache.backoff import delays
from tokencache.core.forced import ThinkingMarks
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.dialects.members import PARSED
from tokencache.engine.drivers.base import Driver
from tokencache.engine.earlier_thoughts import NO_EFFECT, EarlierThoughts, find_earlier_thoughts
from tokencache.engine.logprob_kind import NONE
from tokencache.engine.probe import (
    NO_END,
    PLAIN_ARGS,
    REPLY,
    Capability,
    Level,
    ProbeRequests,
    Requirement,
    chat_prompt_ids,
    higher,
    listed_models,
    probe,
)
from tokencache.engine.reply import Choice
from tokencache.engine.template.agreement import agreeing_local, chat_agrees
from tokencache.engine.template.boundary import ASK
from tokencache.engine.template.edited import EditedHistories
from tokencache.engine.template.learned import LearnedTemplate
from tokencache.engine.template.local import LocalRenderer
from tokencache.engine.template.renderer import EngineRenderer, Renderer, RenderError
from tokencache.engine.template.tails import Tails
from tokencache.engine.template.visible import VisibleReplies
from tokencache.engine.thinking import find_thinking_marks
from tokencache.engine.upstream import AskChat, Upstream
from tokencache.errors import EngineError, passing_cause
from tokencache.recent import Recent

log = logging.getLogger(__name__)

ProbeState = Literal["unprobed", "failed", "lowered", "ready"]

FIRST_DELAY, LONGEST_DELAY = 2.0, 60.0
"""Seconds before an engine is probed again."""
LONGEST_IF_READY = 3600.0
"""The same for an engine whose finding is sufficient, but not final."""
_MOST_ARGUMENTS = 4096
"""Sets of template arguments whose findings are kept: they come from clients, and may be new with every call."""
_MOST_PROBES = 3
"""Number of times that a probe is repeated because its findings were discarded while it ran."""
DOUBT_SECONDS = 10.0
_MOST_MODELS = 64
"""Number of models above which the findings about those that the engine no longer lists are discarded."""
_LIST_SECONDS = 5.0
"""Seconds to wait for the list of models."""


class Model:
    """A model on an engine: the probe's findings, and what is learned while the engine serves it.

    Attributes:
        capability: the findings.
        adapter_of: its base model, if it is a LoRA adapter; otherwise `""`.
        stop_ids: where a reply ends: the ids at which the engine stopped. If it stopped at none in a test, the template's own ends of turn.
        stops_by_itself: whether one of them is known to be the engine's own, and not only the template's, or that of a request.
    """

    def __init__(
        self,
        capability: Capability,
        upstream: Upstream,
        driver: Driver,
        small: Renderer | None = None,
        *,
        learned: set[int] | None = None,
    ) -> None:
        """Create a model. `learned` are stop ids that earlier replies of it showed; those of this one are added."""
        self.capability = capability
        self.adapter_of = capability.adapter_of
        self.driver = driver
        self.stop_ids: set[int] = set(capability.stop_ids or capability.silent_ends)
        self.stops_by_itself = bool(capability.stop_ids)
        self._learned = learned if learned is not None else set()
        self.recall()
        self.renderer = driver.renderer(upstream)
        template = LearnedTemplate(self.renderer, self.stop_ids, small)
        self.tails = Tails(template)
        self.edited_histories = EditedHistories(template)
        self.visible_replies = VisibleReplies(template)
        self._upstream = upstream
        self._thinking: tuple[ThinkingMarks | None] | None = None
        self._earlier_thoughts: Recent[bytes, EarlierThoughts] = Recent(_MOST_ARGUMENTS)
        self._agreed: Recent[bytes, bool] = Recent(_MOST_ARGUMENTS)
        self._lock = asyncio.Lock()

    async def renders_alike(self, args: RenderArgs) -> bool:
        """Whether `/tokenize` renders with these arguments as chat completions do; tested once."""
        known = self._agreed.get(args.digest)
        if known is None:
            async with self._lock:
                known = self._agreed.get(args.digest)
                if known is None:
                    async with self._asking() as (ask, renderer):
                        known = await chat_agrees(partial(chat_prompt_ids, ask), renderer, self.capability.model, args)
                    if known is not None:
                        self._agreed[args.digest] = known
                    if not known:
                        names = ", ".join(sorted({*args.members, *args.chat})) or "no arguments"  # their values are the harness's
                        log.warning("no splicing under %s: /tokenize was not seen to render as chat completions do", names)
        return bool(known)

    async def thinking_marks(self) -> ThinkingMarks | None:
        """Return the ids around a thought, with which a thinking budget ends it; `None` if they are not known. Tested once.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        if self._thinking is None:
            async with self._lock:
                if self._thinking is None:
                    self._thinking = (await self._find_thinking_marks(),)
        return self._thinking[0]

    async def earlier_thoughts(self, fields: Mapping[str, msgspec.Raw]) -> EarlierThoughts:
        """Return what a thought in an earlier reply changes for a request (its raw members). Tested once for what the parser gets of them.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        members = {name: fields[name] for name in PARSED if bytes(fields.get(name, b"null")) != b"null"}
        if not members:
            return self.capability.earlier_thoughts
        key = b"\0".join([bytes(members.get(name, b"")) for name in PARSED])
        known = self._earlier_thoughts.get(key)
        if known is None:
            async with self._lock:
                known = self._earlier_thoughts.get(key)
                if known is None:
                    known = self._earlier_thoughts[key] = await self._find_earlier_thoughts(members)
        return known

    async def _find_earlier_thoughts(self, members: Mapping[str, msgspec.Raw]) -> EarlierThoughts:
        found, driver = self.capability, self.driver
        if not found.honours_ids or not found.tokenizes:
            return NO_EFFECT
        supply, plain = partial(driver.probe_members, ASK, REPLY), await self._plain()
        async with self._asking() as (ask, renderer):
            return await find_earlier_thoughts(ask, renderer, {"model": found.model, **members}, plain, supply, streams=driver.streams)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[tuple[AskChat, EngineRenderer]]:
        """Yield what sends the requests of a test that the probe did not make, and tokenizes for it.

        Raises:
            EngineError: an answer proves nothing: there is none, or it is a server error, and there was none when the engine was probed.
        """
        requests = ProbeRequests(self._upstream, self.driver, self.capability.model)
        yield partial(self.driver.ask, requests), self.driver.renderer(requests)
        if requests.unanswered is not None:
            raise requests.unanswered
        if requests.failure and not self.capability.failure:
            raise EngineError(requests.failure)

    async def _plain(self) -> bytes:
        """Return the packed ids of a question's prompt."""
        try:
            return await self.renderer.render(self.capability.model, [ASK], PLAIN_ARGS, generation=True)
        except RenderError as why:
            raise passing_cause(why) or EngineError(str(why)) from why

    async def _find_thinking_marks(self) -> ThinkingMarks | None:
        found, driver = self.capability, self.driver
        if not found.honours_ids or not found.tokenizes or driver.adds_tail:
            return None
        supply, plain = partial(driver.probe_members, ASK, ASK), await self._plain()
        async with self._asking() as (ask, renderer):
            marks = await find_thinking_marks(ask, renderer, found.model, plain, supply)
        if marks is None:
            log.warning("model %s: it was not seen which ids end a thought whose budget is used up; such turns are marked", found.model)
        return marks

    def observe(self, choice: Choice) -> None:
        """Learn a stop id from a reply: vLLM keeps the stop id at the end of the ids.

        `stop_reason` is `None` if the engine stopped by itself, and the id if the request named it (`stop_token_ids`), as for a base model.
        The finish reason alone proves nothing (a call may be complete when the limit cuts the reply). So only ids that can do nothing but
        end a turn count. This is needed where the probe could not find the stop ids: on an engine without `allowed_token_ids`.
        """
        if choice.finish_reason in {"stop", "tool_calls"} and choice.ids and choice.stop_reason in {None, choice.ids[-1]}:
            last = choice.ids[-1]
            if last in self.capability.turn_ends:
                self.stops_by_itself |= choice.stop_reason is None
                self._learn(last)

    def recall(self) -> None:
        """Use the stop ids that were learned, here or on another replica, and that are still ends of turn of the template."""
        for token in self._learned.intersection(self.capability.turn_ends):
            self._learn(token)

    def _learn(self, token: int) -> None:
        self.stop_ids.add(token)
        self._learned.add(token)
        if self.capability.why == NO_END:
            self.capability = msgspec.structs.replace(self.capability, level="exact", why="")
            log.info("model %s: level=exact: its replies end with %d", self.capability.model, token)


class Minimum(NamedTuple):
    """What a model must be able to do, for a reason: `--require`, or the best level ever found.

    `processed`: its log probabilities are those of the distribution that was sampled from (`logprob_kind`).
    """

    level: Level = "relay"
    why: str = ""
    processed: bool = False

    def missing(self, found: Capability) -> str:
        """Return what a finding lacks, and why that is wanted; `""` if it is sufficient."""
        if higher(found.level, self.level) != found.level:
            return f"its level is {found.level} ({found.why}), and {self.why}"
        if self.processed and found.logprobs != "processed":
            kind = found.logprobs or "of an unknown kind"
            return f"its log probabilities are {kind}, and --require asks for processed: start it with --logprobs-mode processed_logprobs"
        return ""


class ModelState:
    """The state of one model on one engine, and the time of its next probe.

    Attributes:
        model: the result of the last probe that finished; `None` in the states `unprobed` and `failed`.
        failure: why the last probe did not finish; `None` if it did.
        wanted: what a model lacks if its state is `lowered`.
    """

    def __init__(self) -> None:
        self.model: Model | None = None
        self.failure: EngineError | None = None
        self.wanted = Minimum()
        self._delays = delays(FIRST_DELAY, LONGEST_DELAY)
        self._delays_if_ready = delays(FIRST_DELAY, LONGEST_IF_READY)
        self._due = 0.0

    @property
    def state(self) -> ProbeState:
        """The state; the module's docstring has the table."""
        if self.model is not None:
            return "lowered" if self.wanted.missing(self.model.capability) else "ready"
        return "unprobed" if self.failure is None else "failed"

    @property
    def due(self) -> bool:
        """Whether it is time to probe."""
        state = self.state
        final = state == "ready" and self.model is not None and self.model.capability.is_final
        return state == "unprobed" or (not final and time.monotonic() >= self._due)

    def found(self, model: Model, wanted: Minimum) -> None:
        """Keep the result of a probe."""
        self.model, self.failure, self.wanted = model, None, wanted
        self.postpone()

    def failed(self, why: EngineError) -> None:
        """Note that a probe did not finish; keep the known model."""
        self.failure = why
        self.postpone()

    def postpone(self) -> None:
        """Begin the next delay."""
        self._due = time.monotonic() + next(self._delays_if_ready if self.state == "ready" else self._delays)


class Endpoint(msgspec.Struct, frozen=True):
    """Where the calls of a session are sent: an engine and one of its data-parallel ranks; `None` if the engine chooses the rank.

    Attributes:
        key: its name, which all replicas use to choose the same one for a session. That of a whole engine is its URL.
    """

    engine: "Engine"
    rank: int | None
    key: str

    @classmethod
    def of(cls, engine: "Engine", rank: int | None = None) -> "Endpoint":
        """Return the endpoint of an engine, or of one of its ranks."""
        url = engine.upstream.url
        return cls(engine, rank, url if rank is None else f"{url}#{rank}")


class Engine:
    """An engine and its models.

    `drivers` are tried in order. `local` is a local tokenizer, used for the models that it renders like the engine. Below the level
    `required` the engine is not ready. `on_probe` is called with every finding. `frozen` are the names of models that are not trained.
    """

    def __init__(
        self,
        upstream: Upstream,
        drivers: Sequence[Driver],
        *,
        local: LocalRenderer | None = None,
        on_probe: Callable[[Capability], None] | None = None,
        required: Requirement = "relay",
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        self.upstream = upstream
        self._drivers = {driver.name: driver for driver in drivers}
        self.driver = drivers[0]
        """The driver that the last probe chose; before a probe, the first to be tried."""
        self.endpoints: tuple[Endpoint, ...] = (Endpoint.of(self),)
        """Where sessions can be placed on it: on each rank that the last probe found."""
        self.places = False
        """Whether it places sessions itself (`Capability.places`), as the last probe found."""
        self._local = local
        self._on_probe = on_probe
        self._required = required
        self._statuses: dict[str, ModelState] = {}
        """By the model's name in the request; `""` is the first model that the engine serves."""
        self._best: dict[str, Level] = {}
        """The highest level ever found, by the model's own name."""
        self._lock = asyncio.Lock()
        self._away: EngineError | None = None  # why the last probe could not be made: no connection, or 429 or 503
        self._doubted = -math.inf
        self._logged = ""
        self._forgotten = 0
        self.names: tuple[str, ...] = ()
        """The names that it listed last (`/v1/models`): its model, and its adapters."""
        self.frozen = frozen
        self.learned: dict[str, set[int]] = {}
        """Stop ids that replies showed, by model. They hold after a restart of the engine, for the template's own ends of turn."""
        self.weight_label = ""
        """Its own label of its weights (`/weight_info`) when it was checked last; `""` if it has none."""
        self.error = "not probed yet"

    @property
    def trains(self) -> bool:
        """Whether it serves a model that is trained, as far as is known."""
        return not self.frozen or not self.names or not self.frozen.issuperset(self.names)

    async def list_models(self) -> dict[str, dict[str, Any]]:
        """Ask the engine again which models it lists (`/v1/models`): the entry of each, by its name. Without an answer, those known."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_LIST_SECONDS):
                if listed := await listed_models(self.upstream):
                    self.names = tuple(listed)
                    return listed
        known = {found.model: found.max_model_len for found in self.capabilities} or dict.fromkeys(self.names, 0)
        same = {"object": "model", "created": 0, "owned_by": "vllm"}
        return {name: {"id": name, **same, "max_model_len": most} for name, most in known.items()}

    @property
    def models(self) -> list[Model]:
        """The models that were probed so far, one for each requested name."""
        return [status.model for status in self._statuses.values() if status.model is not None]

    @property
    def capabilities(self) -> list[Capability]:
        """The probe's findings for `models`."""
        return [model.capability for model in self.models]

    @property
    def state(self) -> ProbeState:
        """`lowered` if any model is, otherwise `ready` if any is, otherwise `failed` or `unprobed`."""
        states = {status.state for status in self._statuses.values()}
        return next((state for state in ("lowered", "ready", "failed") if state in states), "unprobed")

    async def model(self, name: str = "") -> Model:
        """Return a model; probe it if it is named for the first time.

        Raises:
            EngineError: the engine cannot be reached, or refuses the model; or a recent probe found that.
        """
        if (known := self._known(name)) is not None:
            return known
        before = self._away
        async with self._lock:
            if (away := self._away) is not before and away is not None:
                # Another call found that while this one waited: thousands of calls must not try one after another.
                raise type(away)(away.client_message, private=away.private, status=away.status, reached=away.reached)
            return self._known(name) or await self._probe(name)

    def _known(self, name: str) -> Model | None:
        """Return the model of that name; `None` if it must be probed now.

        Raises:
            EngineError: the last probe failed, and the delay has not passed.
        """
        status = self._statuses.get(name)
        if status is None:
            return None
        if status.model is None and status.failure is not None and not status.due:
            failure = status.failure
            raise EngineError(failure.client_message, private=failure.private, status=failure.status) from failure
        return status.model

    def learn(self, stops: Mapping[str, AbstractSet[int]]) -> None:
        """Add stop ids, by model, that replies showed on another replica."""
        for name, tokens in stops.items():
            self.learned.setdefault(name, set()).update(tokens)
        for status in self._statuses.values():
            if status.model is not None:
                status.model.recall()

    async def probe_again(self) -> None:
        """Probe models whose finding is not final again when their delay has passed; until then they are served by this finding."""
        async with self._lock:
            for status in set(self._statuses.values()):
                if status.model is not None and status.due:
                    try:
                        await self._probe(status.model.capability.model)
                    except EngineError as why:
                        status.failed(why)

    def forget(self, why: str = "the engine went away") -> None:
        """Discard all findings, so that the next call probes; the highest levels stay known."""
        self._statuses.clear()
        self._forgotten += 1
        self.error = why

    def _forget_unlisted(self) -> None:
        """Discard findings about adapters that were unloaded: a trainer may load each version of its weights under a name of its own."""
        for name in self._statuses.keys() - {"", *self.names}:
            del self._statuses[name]
            metrics.forget({"engine": self.upstream.url, "model": name}, metrics.ENGINE_LEVEL)

    def doubt(self, why: str) -> None:
        """Discard all findings because the engine behaves differently; at most once in `DOUBT_SECONDS`."""
        now = time.monotonic()
        if now - self._doubted > DOUBT_SECONDS:
            self._doubted = now
            log.warning("engine %s: probed again: %s", self.upstream.url, why)
            self.forget(why)

    def lost_rank(self, rank: int) -> None:
        """Place no session on a rank until the next probe: the engine refused a request because it does not have this one."""
        if Endpoint.of(self, rank) in self.endpoints:
            self.endpoints = (Endpoint.of(self),)
            self.forget(f"it no longer has the data-parallel rank {rank}")

    async def _probe(self, name: str) -> Model:
        try:
            for _ in range(_MOST_PROBES):  # what was forgotten meanwhile may have been seen by this probe
                forgotten = self._forgotten
                found = await probe(self.upstream, list(self._drivers.values()), name, known=self.driver if self._best else None)
                small = await self._agreeing_tokenizer(found)
                if forgotten == self._forgotten:
                    break
        except EngineError as why:
            self._away = why if why.passing else None
            if not self.capabilities:
                self.error = str(why)
            if not why.passing and (not name or why.status >= HTTPStatus.INTERNAL_SERVER_ERROR):  # a refused name may be a client's mistake
                self._statuses.setdefault(name, ModelState()).failed(why)
            raise
        found = msgspec.structs.replace(found, local_tokenizer=small is not None)
        status = self._statuses.get(found.model)
        if status is not None and status.model is not None and status.state == "ready" and not found.improves(status.model.capability):
            self._statuses[name] = status
            status.postpone()
            return status.model
        wanted = self._wanted(found.model)
        self._best[found.model] = higher(found.level, self._best.get(found.model, "relay"))
        self._log(found, wanted)
        self.driver, self.names, self.places = self._drivers[found.driver], found.served, found.places
        self.endpoints = tuple(Endpoint.of(self, rank if found.ranks > 1 else None) for rank in range(found.ranks))
        if len(self._statuses) > _MOST_MODELS and found.served:
            self._forget_unlisted()
        return self._keep(name, found, small, wanted)

    def _wanted(self, model: str) -> Minimum:
        best = self._best.get(model, "relay")
        required: Level = "exact" if self._required == "processed" else self._required
        level = higher(required, best)
        return Minimum(
            level, f"--require asks for {self._required}" if level == required else f"it was {best} before", self._required == "processed"
        )

    async def _agreeing_tokenizer(self, found: Capability) -> Renderer | None:
        """Return the local tokenizer if there is one and it renders like the engine.

        Raises:
            EngineError: the engine left a request unanswered.
        """
        if self._local is None or found.level != "exact" or not found.tokenizes:
            return None
        requests = ProbeRequests(self.upstream, self._drivers[found.driver], found.model)
        small = await agreeing_local(self._local, self._drivers[found.driver].renderer(requests), found.model)
        if requests.unanswered is not None:
            raise requests.unanswered
        return small

    def _keep(self, name: str, found: Capability, small: Renderer | None, wanted: Minimum) -> Model:
        """Keep a finding under the requested name and under the model's own; both share one state."""
        model = Model(found, self.upstream, self.driver, small, learned=self.learned.setdefault(found.model, set()))
        status = self._statuses.get(found.model) or ModelState()
        status.found(model, wanted)
        self._statuses[name] = self._statuses[found.model] = status
        if self._on_probe is not None:
            self._on_probe(found)
        return model

    def _log(self, found: Capability, wanted: Minimum) -> None:
        """Log a finding, unless it is the same as the last one."""
        missing = wanted.missing(found)
        self.error = f"{missing}; it is probed again" if missing else ""
        seen = f"{found.model}\0{found.level}\0{missing}\0{found.why}\0{found.driver}"
        if self.error and seen == self._logged:
            return
        self._logged = seen
        url = self.upstream.url
        log.log(logging.INFO if found.level == "exact" else logging.WARNING, "engine %s: %s", url, found.summary())
        if found.level == "record":
            log.warning("engine %s: RECORD ONLY: no history will be continued token for token: %s", url, found.why)
        elif found.level == "relay":
            log.error("engine %s: NOTHING IS RECORDED, and its sessions are marked incomplete: %s", url, found.why)
        if self.error:
            log.warning("engine %s: not ready: %s", url, self.error)
        for caution in found.cautions:
            log.warning("engine %s: CHECK ITS OPTIONS: %s", url, caution)
        if found.logprobs_seen.startswith(NONE):
            log.error("engine %s: UNUSABLE LOG PROBABILITIES: %s", url, found.logprobs_seen)
        elif found.logprobs == "raw":
            log.warning(
                "engine %s: RAW LOG PROBABILITIES: they are the policy's only at temperature 1 without top_p, top_k and the like; "
                "start vLLM with --logprobs-mode processed_logprobs",
                url,
            )

"""One engine as the proxy sees it: probed per model, with what is learned of each model's template kept.

A model is probed when it is first named (adapters share an engine but may differ in template), and again when the
engine could not be reached in between: another process may stand there now. What became of the probe is its `ModelState`.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.drivers.base import Driver, DriverChat
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.logprobs import NONE
from tokencache.engine.probe import Capability, probe
from tokencache.engine.questions import Questions
from tokencache.engine.reply import Choice
from tokencache.engine.standing import Level, ModelState, State, higher
from tokencache.engine.template.agreement import agrees
from tokencache.engine.template.local import LocalRenderer
from tokencache.engine.template.renderer import EngineRenderer, Renderer
from tokencache.engine.template.tails import Tails
from tokencache.engine.template.trial import tried
from tokencache.engine.upstream import Upstream
from tokencache.errors import EngineError

log = logging.getLogger(__name__)

DOUBT_SECONDS = 10.0
_SERVERS_FAULT = 500


class Model:
    """A model on an engine: what was found, and what is learned while serving it."""

    def __init__(self, capability: Capability, upstream: Upstream, small: Renderer | None = None, driver: Driver | None = None) -> None:
        self.capability = capability
        self.driver = driver or Vllm()
        self.stop_ids: set[int] = set(capability.stop_ids)
        self.renderer = EngineRenderer(upstream)
        self.tails = Tails(self.renderer, self.stop_ids, small=small)
        self._asked = DriverChat(upstream, self.driver)
        self._agreed: dict[bytes, bool] = {}
        self._lock = asyncio.Lock()

    async def renders_alike(self, args: RenderArgs) -> bool:
        """Whether `/tokenize` renders under these arguments as chat completions do; asked once."""
        known = self._agreed.get(args.digest)
        if known is None:
            async with self._lock:
                known = self._agreed.get(args.digest)
                if known is None:
                    known = await agrees(self._asked, self.renderer, self.capability.model, args)
                    if known is not None:
                        self._agreed[args.digest] = known
                    if not known:
                        names = ", ".join(sorted({*args.members, *args.chat})) or "no arguments"  # what they say is the harness's
                        log.warning("/tokenize is not seen to render as chat completions do under %s: no splicing", names)
        return bool(known)

    def observe(self, choice: Choice) -> None:
        """Learn a stop id from a reply: vLLM keeps the stop id at the end of the ids, and names none as the reason.

        The finish reason alone proves nothing (a call may be whole when the limit cuts the reply): only what can end a
        turn counts. Needed where the probe could not find out: an engine without `allowed_token_ids`.
        """
        if choice.finish_reason in {"stop", "tool_calls"} and choice.stop_reason is None and choice.ids:
            last = choice.ids[-1]
            if last in self.capability.turn_ends:
                self.stop_ids.add(last)


class Engine:
    """An engine and its models; `local` is a local tokenizer to be used for those whose renderings it knows.

    `kinds` are the drivers to try, in order; `required` is the level below which the engine is not ready.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        local: LocalRenderer | None = None,
        on_probe: Callable[[Capability], None] | None = None,
        kinds: Sequence[Driver] = (Vllm(),),
        required: Level = "relay",
    ) -> None:
        self.upstream = upstream
        self._kinds = {driver.name: driver for driver in kinds}
        self.driver = kinds[0]
        """The one that was found; the first to be tried while none was."""
        self._local = local
        self._on_probe = on_probe
        self._required = required
        self._standings: dict[str, ModelState] = {}
        """By the name that the model was asked for by; `""` is the first that the engine serves."""
        self._best: dict[str, Level] = {}
        """The highest level that was ever found, by the model's own name."""
        self._lock = asyncio.Lock()
        self._away: EngineError | None = None
        self._doubted = -math.inf
        self._said = ""
        self.error = "not probed yet"

    @property
    def capabilities(self) -> list[Capability]:
        """What was found so far, per model."""
        return [standing.model.capability for standing in self._standings.values() if standing.model is not None]

    @property
    def state(self) -> State:
        """The state of the model that is furthest from ready, of those that were found; `unprobed` or `failed` while none was."""
        states = {standing.state for standing in self._standings.values()}
        found = [state for state in ("lowered", "ready", "failed") if state in states]
        return found[0] if found else "unprobed"

    async def model(self, name: str = "") -> Model:
        """Return a model, probing it when it is named for the first time.

        Raises:
            EngineError: the engine cannot be reached, or refuses the model; or did so a moment ago.
        """
        if (known := self._known(name)) is not None:
            return known
        away = self._away
        async with self._lock:
            if self._away is not away and self._away is not None:
                # Found out while this one waited: thousands of calls must not try one after another.
                raise EngineError(self.error, reached=False) from self._away
            return self._known(name) or await self._probe(name)

    def _known(self, name: str) -> Model | None:
        """The model of that name; `None` if it is to be probed now.

        Raises:
            EngineError: the probe failed a moment ago.
        """
        standing = self._standings.get(name)
        if standing is None:
            return None
        if standing.model is None and standing.failure is not None and not standing.due:
            raise EngineError(str(standing.failure), status=standing.failure.status) from standing.failure
        return standing.model

    async def look_again(self) -> None:
        """Probe those models anew whose level fell, if it is time; they go on being served as they are meanwhile."""
        async with self._lock:
            for standing in set(self._standings.values()):
                if standing.model is not None and standing.state == "lowered" and standing.due:
                    try:
                        await self._probe(standing.model.capability.model)
                    except EngineError as why:
                        standing.failed(why)

    def forget(self, why: str = "the engine went away") -> None:
        """Probe anew at the next call: the engine went away. The levels that were found stay known."""
        self._standings.clear()
        self.error = why

    def doubt(self, why: str) -> None:
        """Probe anew at the next call: the engine does other than was found.

        Unless that was done a moment ago: what goes wrong with every call is not found out better by asking with every call.
        """
        now = time.monotonic()
        if now - self._doubted > DOUBT_SECONDS:
            self._doubted = now
            self.forget(why)

    async def _probe(self, name: str) -> Model:
        try:
            found = await probe(self.upstream, name, list(self._kinds.values()))
            small = await self._tried(found)
        except EngineError as why:
            self._away = None if why.reached else why
            if not self.capabilities:
                self.error = str(why)
            if not why.passing and (not name or why.status >= _SERVERS_FAULT):  # a name that is refused may be another's mistake
                self._standings.setdefault(name, ModelState()).failed(why)
            raise
        found = msgspec.structs.replace(found, local_tokenizer=small is not None)
        wanted = higher(self._required, self._best.get(found.model, "relay"))
        self._best[found.model] = higher(found.level, self._best.get(found.model, "relay"))
        self._tell(found, wanted)
        self.driver = self._kinds[found.driver]
        return self._keep(name, found, small, wanted)

    async def _tried(self, found: Capability) -> Renderer | None:
        """The local tokenizer, if there is one and it renders as the engine does.

        Raises:
            EngineError: the engine left a question unanswered.
        """
        if self._local is None or found.level != "exact" or not found.tokenizes:
            return None
        questions = Questions(self.upstream)
        small = await tried(self._local, EngineRenderer(questions), found.model)
        if questions.unanswered is not None:
            raise questions.unanswered
        return small

    def _keep(self, name: str, found: Capability, small: Renderer | None, wanted: Level) -> Model:
        """Keep what was found, under the name that was asked for and the model's own: both are one model."""
        standing = self._standings.get(found.model)
        if standing is None or standing.model is None or standing.state == "lowered":
            standing = standing or ModelState()
            standing.found(Model(found, self.upstream, small, self.driver), wanted)
        self._standings[name] = self._standings[found.model] = standing
        assert standing.model is not None  # noqa: S101 - it was found
        if self._on_probe is not None:
            self._on_probe(found)
        return standing.model

    def _tell(self, found: Capability, wanted: Level) -> None:
        """Log what was found, unless a probe said the same just before."""
        self.error = ""
        if higher(found.level, wanted) != found.level:
            reason = f"--require asks for {wanted}" if wanted == self._required else f"it was {wanted} before"
            self.error = f"its level is {found.level} ({found.why}), and {reason}: it is probed again until it is"
        said = f"{found.model}\0{found.level}\0{wanted}\0{found.why}\0{found.driver}"
        if self.error and said == self._said:
            return
        self._said = said
        url = self.upstream.url
        log.log(logging.INFO if found.level == "exact" else logging.WARNING, "engine %s: %s", url, found.line())
        if found.level == "record":
            log.warning("RECORD ONLY: no history will be continued token for token on %s: %s", url, found.why)
        elif found.level == "relay":
            log.error("NOTHING IS RECORDED of what is said on %s, and sessions are left incomplete: %s", url, found.why)
        if self.error:
            log.warning("engine %s: not ready: %s", url, self.error)
        if found.logprobs_seen.startswith(NONE):
            log.error("UNUSABLE LOG PROBABILITIES on %s: %s", url, found.logprobs_seen)

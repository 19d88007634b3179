"""One engine as the proxy sees it: probed per model, with what is learned of each model's template kept.

A model is probed when it is first named (adapters share an engine but may differ in template), and again when the
engine could not be reached in between: another process may stand there now.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engines.driver import Asked, Driver
from tokencache.engines.logprobs import NONE
from tokencache.engines.probe import Capability, probe
from tokencache.engines.reply import Choice
from tokencache.engines.upstream import Upstream
from tokencache.engines.vllm import Vllm
from tokencache.errors import EngineError
from tokencache.render.agreement import agrees
from tokencache.render.local import LocalRenderer
from tokencache.render.renderer import EngineRenderer, Renderer
from tokencache.render.tails import Tails
from tokencache.render.trial import tried

log = logging.getLogger(__name__)

DOUBT_SECONDS = 10.0


class Model:
    """A model on an engine: what was found, and what is learned while serving it."""

    def __init__(self, capability: Capability, upstream: Upstream, small: Renderer | None = None, driver: Driver | None = None) -> None:
        self.capability = capability
        self.driver = driver or Vllm()
        self.stop_ids: set[int] = set(capability.stop_ids)
        self.renderer = EngineRenderer(upstream)
        self.tails = Tails(self.renderer, self.stop_ids, small=small)
        self._asked = Asked(upstream, self.driver)
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

    `kinds` are the drivers to try, in order.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        local: LocalRenderer | None = None,
        on_probe: Callable[[Capability], None] | None = None,
        kinds: Sequence[Driver] = (Vllm(),),
    ) -> None:
        self.upstream = upstream
        self._kinds = {driver.name: driver for driver in kinds}
        self.driver = kinds[0]
        """The one that was found; the first to be tried while none was."""
        self._local = local
        self._on_probe = on_probe
        self._models: dict[str, Model] = {}
        self._lock = asyncio.Lock()
        self._away: EngineError | None = None
        self._doubted = -math.inf
        self.error = "not probed yet"

    @property
    def capabilities(self) -> list[Capability]:
        """What was found so far, per model."""
        return [model.capability for model in self._models.values()]

    async def model(self, name: str = "") -> Model:
        """Return a model, probing it when it is named for the first time.

        Raises:
            EngineError: the engine cannot be reached, or refuses the model.
        """
        known = self._models.get(name)
        if known is None:
            away = self._away
            async with self._lock:
                if self._away is not away and self._away is not None:
                    # Found out while this one waited: thousands of calls must not try one after another.
                    raise EngineError(self.error, reached=False) from self._away
                known = self._models.get(name) or await self._probe(name)
        return known

    def forget(self, why: str = "the engine went away") -> None:
        """Probe anew at the next call: the engine went away."""
        self._models.clear()
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
            found = await probe(self.upstream, EngineRenderer(self.upstream), name, list(self._kinds.values()))
        except EngineError as why:
            self.error = str(why)
            self._away = None if why.reached else why
            raise
        small = None
        if self._local is not None and found.level == "exact" and found.tokenizes:
            small = await tried(self._local, EngineRenderer(self.upstream), found.model)
            found = msgspec.structs.replace(found, local_tokenizer=small is not None)
        log.log(logging.INFO if found.level == "exact" else logging.WARNING, "engine %s: %s", self.upstream.url, found.line())
        if found.level == "record":
            log.warning("RECORD ONLY: no history will be continued token for token on %s: %s", self.upstream.url, found.why)
        elif found.level == "relay":
            log.error("NOTHING IS RECORDED of what is said on %s, and sessions are left incomplete: %s", self.upstream.url, found.why)
        if found.logprobs_seen.startswith(NONE):
            log.error("UNUSABLE LOG PROBABILITIES on %s: %s", self.upstream.url, found.logprobs_seen)
        self.error = ""
        self.driver = self._kinds[found.driver]
        model = self._models[name] = self._models.setdefault(found.model, Model(found, self.upstream, small, self.driver))
        if self._on_probe is not None:
            self._on_probe(found)
        return model

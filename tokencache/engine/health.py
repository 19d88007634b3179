"""Checks the health of an engine: is it reachable, and is it still the same model and version?

An engine that refuses a connection is marked down at once, whether a call or a check notices it. An engine that answers slowly, or with a
server error, is marked down after a few such answers in a row: a process that is busy for a second must keep its sessions, because their
prefix cache would be cold elsewhere. When an engine answers again it is probed first, because another process may run there now.

The check is `GET /health`, which vLLM, its router and SGLang have. vLLM answers 503 when the engine process is dead. A server without that
route (404: NeMo RL's worker, which has only `/v1/chat/completions` and `/tokenize`) gets that request only once. Later checks open a
connection and close it, which no server logs as an error. After the server was down, it gets the request again.

An engine that has a label of its weights (`Driver.weights_route`) is asked for it with each check.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
import xxhash

from tokencache import metrics
from tokencache.background import repeat
from tokencache.engine.capacity import CapacityError
from tokencache.engine.model import Engine, Model
from tokencache.engine.probe import PLAIN_ARGS
from tokencache.engine.template.boundary import ASK
from tokencache.engine.template.renderer import RenderError
from tokencache.errors import NO_ROUTE, EngineError
from tokencache.store.clock import RECORD_CLOCK

log = logging.getLogger(__name__)

CHECK_EVERY = 2.0
"""Seconds between two checks, varied at random by up to a quarter, so that replicas do not check at the same time."""
TIMEOUT_SECONDS = 5.0
"""Seconds to wait for an answer."""
STRIKES = 3
"""Number of slow or bad answers in a row after which an engine is marked down."""
RECONSIDER_SECONDS = 60.0
"""Seconds after which an engine that differs from the others is probed again, and the others are identified again."""
_SAMPLE = (ASK, b'{"role":"assistant","content":"Well, \xe2\x98\x95."}', b'{"role":"user","content":"<|im_end|> 1.50"}')
_NOT_IDENTIFYING = frozenset(
    {
        *("version", "why", "how", "cautions", "failure", "logprobs_seen", "local_tokenizer", "stop_ids", "stop_candidates"),
        *("places", "ranks", "served"),
        *(
            "prefixes",
            "prefixes_why",
            "images",
            "images_why",
            "placeholder_ids",
            "placeholder",
        ),  # an engine without the plugin still serves text
    }
)
"""Members of a capability that may differ between the engines of one session: descriptions, and findings that serving corrects."""


class EngineIdentity(msgspec.Struct, frozen=True):
    """What engines must have in common to serve one session: the probe's findings, and a hash of a sample rendering.

    `rendering` is `""` if it is not known, because the engine is the only one or cannot render.
    """

    capability: dict[str, object]
    rendering: str

    def differences(self, other: "EngineIdentity") -> list[str]:
        """Describe each difference between this identity and `other`."""
        here, there = self.capability, other.capability
        found = [f"{name} is {value}, not {there.get(name)}" for name, value in here.items() if value != there.get(name)]
        if self.rendering and other.rendering and self.rendering != other.rendering:
            found.append("its template or tokenizer gives other ids")
        return found


class EngineMonitor:
    """Checks one engine; calls `on_change` whenever the engine was marked down or probed.

    Attributes:
        url: the engine's base URL.
        alone: whether there is no other engine to compare it with (`gain_peers`).
        checked: set after the first check, whatever it found.
        draining: whether it takes no new calls; calls under way run to their end.
        has_health: whether it has `GET /health`, as far as is known.
        has_label: whether it has the route of its label (`Driver.weights_route`), as far as is known.
        gone_at: when the engine was seen down the last time, or when it was added, Unix time in seconds. Its process may be younger.
        falls: how often the engine was seen down.
        identity: the result of the last probe, kept while the engine is down; `None` if not known.
        capacity: data-parallel rank → tokens of its KV cache; empty if that is not known. `capacity_error` is the reason.
        identified: when its identity was determined, in seconds of the monotonic clock.
        mismatched: whether it differs from the engines that serve its model. Such an engine is probed again from time to time, because the
            last probe may have come at a bad moment.
    """

    def __init__(self, engine: Engine, on_change: Callable[[], None], *, alone: bool) -> None:
        self.engine, self.url = engine, engine.upstream.url
        self.draining = False
        self.checked = asyncio.Event()
        self.has_health = self.has_label = True
        self.gone_at, self.falls = 0.0, 0
        self.identity: EngineIdentity | None = None
        self.mismatched = False
        self.alone = alone
        self._on_change = on_change
        self.capacity: dict[str, int] = {}
        self.capacity_error = ""
        self._known: Model | None = None
        self._measured: Model | None = None  # whose capacity was read
        self.identified = 0.0
        self._strikes = 0
        self._logged = ""

    @property
    def ready(self) -> bool:
        """Whether the last probe found a sufficient level (`model`), and the engine has been reachable since."""
        return self.engine.state == "ready"

    @property
    def version(self) -> str:
        """The version that the engine reports; `""` before a probe."""
        return next((found.version for found in self.engine.capabilities), "")

    async def run(self) -> None:
        """Check until cancelled."""
        await repeat("engine-health", self.check, CHECK_EVERY, about=self.url, at_once=True, jitter=0.25)

    async def gain_peers(self) -> None:
        """Note that the engine is no longer the only one, and identify it again, now with a sample rendering.

        An engine that does not answer in time is identified by a later check.
        """
        self.alone, self.identity, self._known = False, None, None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self.check()

    async def check(self) -> None:
        """Check once, and probe if needed."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                problem = await self._problem()
                await self._read_label()
        except TimeoutError:
            self._strike(f"no answer to /health within {TIMEOUT_SECONDS:g} s")
        except EngineError as why:
            self.mark_down(str(why)) if why.down else self._strike(str(why))
        else:
            if problem:
                self._strike(problem)
            else:
                self._strikes = 0
                await self._identify()
                if self._measured is not self._known:
                    await self._read_capacity()
        self.checked.set()

    def update_identity(self, newest: float) -> None:
        """Let the next check identify the engine again if that was long before `newest`: a template may write the date."""
        if newest - self.identified > RECONSIDER_SECONDS:
            self._known = None

    async def answers(self) -> bool:
        """Whether the engine answers a check now."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return not await self._problem()
        except (TimeoutError, EngineError):
            return False

    async def _problem(self) -> str:
        """Return what is wrong with the answer to a check; `""` if nothing is wrong.

        Raises:
            EngineError: the engine cannot be reached, or closed the connection.
        """
        if not self.has_health:
            await self.engine.upstream.connect()
            return ""
        status = (await self.engine.upstream.get("/health")).status
        self.has_health = status not in NO_ROUTE
        return f"/health answered {status}" if status >= HTTPStatus.INTERNAL_SERVER_ERROR and self.has_health else ""

    async def _read_label(self) -> None:
        """Ask for the label of the engine's weights.

        Raises:
            EngineError: the engine cannot be reached, or closed the connection.
        """
        if self.has_health and self.has_label:
            answer = await self.engine.upstream.get(self.engine.driver.weights_route)
            self.has_label = answer.status not in NO_ROUTE
            self.engine.weight_label = self.engine.driver.weight_label(answer) or ""

    async def _read_capacity(self) -> None:
        """Read the size of the KV cache, once for each process of the engine. It has no effect on whether the engine serves."""
        driver, known = self.engine.driver, self._known
        if not driver.capacity_route:
            self.capacity, self.capacity_error, self._measured = {}, "engines of this kind do not report it", known
            return
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                answer = await self.engine.upstream.get(driver.capacity_route)
            self.capacity, self.capacity_error = driver.capacities(answer), ""
        except (EngineError, TimeoutError):
            self.capacity_error = self.capacity_error or "its metrics could not be read yet"
            return
        except CapacityError as why:
            self.capacity, self.capacity_error = {}, str(why)
            log.info("engine %s: the size of its KV cache is not known: %s", self.url, why)
        self._measured = known

    def mark_down(self, why: str) -> None:
        """Send no calls to the engine until it answers a check."""
        self.engine.forget(why)
        self.gone_at = RECORD_CLOCK.now()
        self.falls += 1
        self.has_health = self.has_label = True  # another server may run there later
        self._log(f"down: {why}")
        metrics.ENGINE_UP.labels(self.url).set(0)
        metrics.forget({"engine": self.url}, metrics.ENGINE_LEVEL)  # the next one there may serve another model
        self._on_change()

    def _strike(self, why: str) -> None:
        self._strikes += 1
        if self._strikes >= STRIKES or not self.engine.capabilities:
            self.mark_down(why)

    async def _identify(self) -> None:
        """Probe and identify the engine, unless that was done."""
        if self.mismatched and time.monotonic() - self.identified > RECONSIDER_SECONDS:
            self.engine.forget("it differs from the others and is probed again")
        try:
            await self.engine.probe_again()
            model = await self.engine.model()
            if model is self._known:
                return
            self.identity = await _identity(model, alone=self.alone)
        except (EngineError, RenderError) as why:
            self._log(f"not ready: {why}")
            self.has_health = self.has_label = True  # so far, a gateway may have answered for it
            return
        self._known, self.identified, self._logged = model, time.monotonic(), ""
        metrics.ENGINE_UP.labels(self.url).set(1)
        self._on_change()

    def _log(self, event: str) -> None:
        """Log an event, unless it is the same as the last one."""
        if event != self._logged:
            log.warning("engine %s: %s", self.url, event)
        self._logged = event


async def _identity(model: Model, *, alone: bool) -> EngineIdentity:
    """Determine the identity of an engine.

    Raises:
        RenderError: the engine does not render, although it did when it was probed.
    """
    found = {name: value for name, value in msgspec.structs.asdict(model.capability).items() if name not in _NOT_IDENTIFYING}
    if alone or not model.capability.tokenizes:
        return EngineIdentity(found, "")
    return EngineIdentity(found, await sample_rendering(model))


async def sample_rendering(model: Model) -> str:
    """Hash the token ids of a sample conversation: it differs between templates, and between tokenizers.

    Raises:
        EngineError: the engine cannot be reached.
        RenderError: the engine cannot render.
    """
    return xxhash.xxh3_128_hexdigest(await model.renderer.render(model.capability.model, _SAMPLE, PLAIN_ARGS, generation=True))

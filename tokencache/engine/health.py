"""Health: is an engine there, and is it what it was?

An engine that cannot be connected to is out at once, whoever notices it, a call or the watch. One that answers slowly, or with
a server's error, is out when it has done so a few times running: a process that is busy for a second must not lose its
sessions, for they would find their prefix cache cold elsewhere. It comes back when it answers, and is probed anew first: another
process may stand there now.

The question is `GET /health`, which vLLM, its router and SGLang have; vLLM's answers 503 when the engine behind the API is
dead. A server without that route (404: NeMo RL's worker, which has `/v1/chat/completions` and `/tokenize` alone) is asked once:
from then on a connection is opened to it and closed, which no server logs as an error. It is asked again when it was out.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable

import msgspec
import xxhash

from tokencache import metrics
from tokencache.engine.model import Engine, Model
from tokencache.engine.probe import PLAIN_ARGS
from tokencache.engine.template.boundary import ASK
from tokencache.engine.template.renderer import RenderError
from tokencache.errors import EngineError

log = logging.getLogger(__name__)

CHECK_EVERY = 2.0
"""Seconds between two questions, give or take a quarter: engines and replicas must not fall into step."""
PATIENCE_SECONDS = 5.0
"""Seconds to wait for an answer."""
STRIKES = 3
"""Slow or bad answers running after which an engine is out."""
_NO_ROUTE = frozenset({404, 405, 501})
"""Status codes with which a server says that it has no `GET /health`."""
RECONSIDER_SECONDS = 60.0
"""Seconds after which an engine that differs from the others is probed anew."""
_SERVERS_FAULT = 500
_SHOWN = (ASK, b'{"role":"assistant","content":"Well, \xe2\x98\x95."}', b'{"role":"user","content":"<|im_end|> 1.50"}')
_NO_KIND = ("version", "why", "how", "logprobs_seen", "local_tokenizer", "stop_ids", "stop_candidates")
"""Members of a capability that tell no engine from another: words, and what is found by sampling and corrected while serving."""


class Kind(msgspec.Struct, frozen=True):
    """What engines must have in common to serve one session: what was found by the probe, and what their template and tokenizer write.

    `rendering` is `""` where that was not found out: the engine has no peer, or renders nothing.
    """

    capability: dict[str, object]
    rendering: str

    def differences(self, other: "Kind") -> list[str]:
        """Say what is different here from `other`."""
        here, there = self.capability, other.capability
        found = [f"{name} is {value}, not {there.get(name)}" for name, value in here.items() if value != there.get(name)]
        if self.rendering and other.rendering and self.rendering != other.rendering:
            found.append("its template or tokenizer writes other ids")
        return found


class Watch:
    """Watches one engine; `on_change` is called whenever it went, or was probed.

    Attributes:
        alone: it has no peer to be held against (`has_peers`).
        draining: it takes no new calls; those under way run to their end.
        has_health: whether it has `GET /health`, as far as is known.
        kind: what it was when it was last probed, be it out since; `None` while that is not known.
        odd: it differs from those that serve. It is probed anew now and then: perhaps the probe met it at a bad moment.
    """

    def __init__(self, engine: Engine, on_change: Callable[[], None], *, alone: bool) -> None:
        self.engine = engine
        self.draining = False
        self.has_health = True
        self.kind: Kind | None = None
        self.odd = False
        self._on_change = on_change
        self.alone = alone
        self._known: Model | None = None
        self._probed = 0.0
        self._strikes = 0
        self._said = ""

    @property
    def url(self) -> str:
        """The engine's base URL."""
        return self.engine.upstream.url

    @property
    def ready(self) -> bool:
        """Whether it was probed, is what is wanted (`standing`), and was not lost since."""
        return self.engine.state == "ready"

    @property
    def version(self) -> str:
        """The version that it says it is; `""` while it is not probed."""
        return next((found.version for found in self.engine.capabilities), "")

    async def keep(self) -> None:
        """Watch until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(CHECK_EVERY * random.uniform(0.75, 1.25))

    async def has_peers(self) -> None:
        """It was alone: find out now what its template and tokenizer write."""
        self.alone, self.kind, self._known = False, None, None
        await self.look()

    async def look(self) -> None:
        """Ask once, and probe what is not known."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                why = await self._ask()
        except TimeoutError:
            self._strike(f"no answer to /health within {PATIENCE_SECONDS:g} s")
        except EngineError as why_not:
            self._strike(str(why_not)) if why_not.reached else self.out(str(why_not))
        else:
            if why:
                self._strike(why)
            else:
                self._strikes = 0
                await self._learn()

    async def _ask(self) -> str:
        """Ask whether it is there: `""`, or what it answered that is no good.

        Raises:
            EngineError: it cannot be reached, or closed the connection.
        """
        if not self.has_health:
            await self.engine.upstream.connect()
            return ""
        status = (await self.engine.upstream.get("/health")).status
        self.has_health = status not in _NO_ROUTE
        return f"/health answered {status}" if status >= _SERVERS_FAULT and self.has_health else ""

    def out(self, why: str) -> None:
        """It cannot be connected to: nothing goes there until it answers."""
        self.engine.forget(why)
        self.has_health = True  # another server may stand there when it is back
        self._say(f"out: {why}")
        metrics.ENGINE_UP.labels(self.url).set(0)
        self._on_change()

    def _strike(self, why: str) -> None:
        self._strikes += 1
        if self._strikes >= STRIKES or not self.engine.capabilities:
            self.out(why)

    async def _learn(self) -> None:
        """It answers: find out what it is, unless that is known."""
        if self.odd and time.monotonic() - self._probed > RECONSIDER_SECONDS:
            self.engine.forget("it differs from the others: probed anew")
        try:
            await self.engine.look_again()
            model = await self.engine.model()
            if model is self._known:
                return
            self.kind = await _kind_of(model, alone=self.alone)
        except (EngineError, RenderError) as why:
            self._say(f"not ready: {why}")
            return
        self._known, self._probed, self._said = model, time.monotonic(), ""
        metrics.ENGINE_UP.labels(self.url).set(1)
        self._on_change()

    def _say(self, what: str) -> None:
        """Say it once, however often it is found."""
        if what != self._said:
            log.warning("engine %s: %s", self.url, what)
        self._said = what


async def _kind_of(model: Model, *, alone: bool) -> Kind:
    """Find out what engines must have in common.

    Raises:
        RenderError: the engine renders nothing, though it did when it was probed.
    """
    found = {name: value for name, value in msgspec.structs.asdict(model.capability).items() if name not in _NO_KIND}
    if alone or not model.capability.tokenizes:
        return Kind(found, "")
    packed = await model.renderer.render(model.capability.model, _SHOWN, PLAIN_ARGS, generation=True)
    return Kind(found, xxhash.xxh3_128_hexdigest(packed))

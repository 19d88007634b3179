"""Measures what a parser of the engine lost: the engine decodes the ids of replies, and the texts are compared with what was served.

It costs one `/detokenize` for each turn, and one rendering for each model. A turn never changes, so its result is cached until the engine
is probed as a different one. Nothing is measured during a call.
"""

import asyncio
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import msgspec

from tokencache.core import ids
from tokencache.core.lost_text import SAMPLE, SAMPLE_WITHOUT_CALLS, LostText, Markup, find_lost_text, markup_of
from tokencache.core.turn import UNRECEIVED, Tokens, Turn
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.model import Model
from tokencache.engine.pool import Pool
from tokencache.engine.template.renderer import RenderError, TemplateRefusedError
from tokencache.errors import EngineError
from tokencache.metrics import LOST_TEXT, counter
from tokencache.recent import Recent

CACHED_TURNS = 8192
"""Number of turns of each model whose result is cached."""
_ARGUMENTS = RenderArgs(b"", b"", {}, {}, {}, None)


class LostTextMeter:
    """Measures the lost text of sessions. `timeout` is the time in seconds for all turns of a session together."""

    def __init__(self, pool: Pool, *, timeout: float) -> None:
        self._pool, self._timeout = pool, timeout
        self._lock = asyncio.Lock()
        self._markup: WeakKeyDictionary[Model, Markup] = WeakKeyDictionary()
        self._cache: WeakKeyDictionary[Model, Recent[str, LostText]] = WeakKeyDictionary()

    async def measure(self, turns: Sequence[Turn], tokens: Mapping[str, Tokens]) -> dict[str, LostText]:
        """Compare turns with what was served, by turn id.

        `LostText.unknown` is one of these, or one of `find_lost_text`:

        ================  =====================================================================================
        `broken-off`      the reply did not end by itself, or its client left: what is missing was not dropped
        `engine-away`     the engine does not decode its own ids, or does not render the sample reply
        `time-limit`      measuring earlier turns used up the time
        ================  =====================================================================================
        """
        found: dict[str, LostText] = {}
        try:
            async with asyncio.timeout(self._timeout):
                for turn in turns:
                    found[turn.id] = await self._turn(turn, tokens[turn.id])
        except TimeoutError:
            found = {turn.id: found.get(turn.id, LostText(unknown="time-limit")) for turn in turns}
        return found

    async def _turn(self, turn: Turn, tokens: Tokens) -> LostText:
        if not UNRECEIVED.isdisjoint(turn.marks):
            return LostText(unknown="broken-off")
        if not turn.completion_tokens:
            return LostText()
        try:
            model = await self._pool.model(turn.model)
            cache = self._cache.setdefault(model, Recent(CACHED_TURNS))
            async with self._lock:
                if turn.id not in cache:
                    cache[turn.id] = await self._compared(model, turn, tokens)
                return cache[turn.id]
        except (EngineError, RenderError):
            return LostText(unknown="engine-away")

    async def _compared(self, model: Model, turn: Turn, tokens: Tokens) -> LostText:
        markup = await self._markup_of(model)
        packed = tokens.completion[: -ids.ID_BYTES] if turn.stopped else tokens.completion
        sampled = await model.renderer.read(turn.model, packed) if packed else ""
        if isinstance(turn.stop_reason, str) and not turn.served_text.endswith(turn.stop_reason):
            sampled = sampled.rpartition(turn.stop_reason)[0] or sampled
        served = msgspec.structs.replace(turn.served, content=turn.served_text or None)
        found = await asyncio.to_thread(find_lost_text, sampled, served, markup)
        counter(LOST_TEXT, "unknown" if found.unknown else "lost" if found.texts else "whole").inc()
        return found

    async def _markup_of(self, model: Model) -> Markup:
        """Read the markup of a model from its template."""
        if model not in self._markup:
            name, renderer = model.capability.model, model.renderer
            try:
                packed = await renderer.render(name, [*map(msgspec.json.encode, SAMPLE)], _ARGUMENTS, generation=False)
            except TemplateRefusedError:
                packed = await renderer.render(name, [*map(msgspec.json.encode, SAMPLE_WITHOUT_CALLS)], _ARGUMENTS, generation=False)
            self._markup[model] = markup_of(await renderer.read(name, packed))
        return self._markup[model]

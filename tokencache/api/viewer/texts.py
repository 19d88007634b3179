r"""Texts: what each token says.

An engine reads ids as one text (`/detokenize`); what each single id says is found by asking for it between two tokens whose
text is known: `STOP a STOP b STOP` comes back with the texts of `a` and `b` parted by that of the stop id. One request reads
some hundred ids. What an id says is remembered; a vocabulary is finite.

A byte-level vocabulary has tokens that are pieces of a character (`☕` may be three), and alone they read as U+FFFD. Such a
token is read together with those behind it, up to four more, until the text is whole; the group's text then stands with its first token.

Nothing is guessed: where the answer does not come apart into as many pieces as were asked for, there is no text.
"""

import asyncio
import time
from collections.abc import Sequence

from tokencache.core import ids
from tokencache.engine.model import Model
from tokencache.engine.pool import Pool
from tokencache.engine.template.renderer import RenderError
from tokencache.errors import EngineError

BATCH = 512
"""Ids in one request: a millisecond or two of the engine's time."""

_PART = "\ufffd"
_LONGEST = 5
"""Tokens that one group may have: a character has four bytes, and the last piece may begin the next."""
_PATIENCE = 5.0
_REST = 5.0
"""Seconds for which an engine that did not answer is not asked again."""
_REMEMBERED = 600_000

Piece = tuple[int, ...]


class Unread(Exception):  # noqa: N818 - no error: the ids are shown without a text
    """The engine cannot say what the tokens are; the message says why."""


class TokenTexts:
    """Reads single tokens through an engine, one request at a time."""

    def __init__(self, engine: Pool) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._known: dict[tuple[str, Piece], str] = {}
        self._away: tuple[float, str] = (0.0, "")

    async def read(self, model: str, tokens: Sequence[int]) -> list[str | None]:
        """Read tokens as they stand beside each other; `None` for one whose text stands with the token before it.

        Raises:
            Unread: the engine cannot say.
        """
        async with self._lock:
            if time.monotonic() < self._away[0]:
                raise Unread(self._away[1])
            try:
                async with asyncio.timeout(_PATIENCE):
                    return await self._read(await self._engine.model(model), tokens)
            except (EngineError, RenderError, TimeoutError) as why:
                told = str(why) or "the engine does not answer"
                self._away = (time.monotonic() + _REST, told)
                raise Unread(told) from why

    async def _read(self, model: Model, tokens: Sequence[int]) -> list[str | None]:
        alone = await self._texts(model, {(token,) for token in tokens})
        parts = {i for i, token in enumerate(tokens) if _PART in alone[token,]}
        groups = {tuple(tokens[i : i + n]) for i in parts for n in range(2, _LONGEST + 1) if parts.issuperset(range(i, i + n))}
        whole = await self._texts(model, groups) if groups else {}
        texts: list[str | None] = []
        while len(texts) < len(tokens):
            at = len(texts)
            own = alone[tokens[at],]
            size = 1
            if _PART in own:
                sizes = (n for n in range(2, _LONGEST + 1) if _PART not in whole.get(tuple(tokens[at : at + n]), _PART))
                size = next(sizes, 1)
            texts += [own if size == 1 else whole[tuple(tokens[at : at + size])], *[None] * (size - 1)]
        return texts

    async def _texts(self, model: Model, pieces: set[Piece]) -> dict[Piece, str]:
        """The text of each piece, read on its own."""
        name = model.capability.model
        stop = min(model.stop_ids, default=None)
        if stop is None:
            raise RenderError("no stop id is known that could part the tokens")
        if (name, (stop,)) not in self._known:
            self._known[name, (stop,)] = await model.renderer.read(name, ids.pack([stop]))
        batch: list[Piece] = []
        for piece in sorted(piece for piece in pieces if (name, piece) not in self._known):
            batch.append(piece)
            if sum(map(len, batch)) >= BATCH:
                await self._ask(model, stop, batch)
                batch = []
        await self._ask(model, stop, batch)
        texts = {piece: self._known[name, piece] for piece in pieces}
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        return texts

    async def _ask(self, model: Model, stop: int, pieces: Sequence[Piece]) -> None:
        """Ask for the texts of pieces, in one request, and remember them."""
        name = model.capability.model
        asked = [stop]
        for piece in pieces:
            asked += [*piece, stop]
        between = self._known[name, (stop,)]
        told = (await model.renderer.read(name, ids.pack(asked))).split(between) if pieces and between else []
        if pieces and (len(told) != len(pieces) + 2 or told[0] or told[-1]):
            raise RenderError("/detokenize does not keep tokens apart")
        self._known |= {(name, piece): text for piece, text in zip(pieces, told[1:-1], strict=True)}

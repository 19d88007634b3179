r"""Returns the tokens of a sequence, a window at a time: ids, kinds, log probabilities and texts.

A sequence of a hundred thousand tokens stays packed, as the store keeps it. Only the window that is shown is unpacked. *Runs* are ranges of
tokens of one kind:

=========  ==========================================================================================================
`prompt`   the prompt of the first turn: the harness's messages, as the template renders them
`earlier`  a reply within that prompt that an earlier sequence sampled and trains; here it is context (`branch`)
`anchor`   a recognized reply with its exact ids in an edited context (`resplice`); here it is context too
`tail`     the tokens between two replies: end of turn, new messages, generation prompt
`sampled`  sampled by the policy in this sequence: mask 1
`unscored` sampled too, but without log probabilities, or forced by a thinking budget: mask 0
=========  ==========================================================================================================

Texts come from the engine's `/detokenize`, which returns one text for all ids of a request. So the ids are sent with the stop id between
them: `STOP a STOP b STOP` returns the texts of `a` and `b` separated by the text of the stop id. One request decodes several hundred ids.
Texts are cached, because a vocabulary is finite.

In a byte-level vocabulary a token may be a part of a character (`☕` may be three tokens), and alone decodes to U+FFFD. Such a token is
decoded together with up to four tokens after it, until the text is whole. The first token then gets the text of the group. If the decoded
text does not split into the expected number of pieces, no text is returned.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from tokencache.api.viewer.sessions import is_scored
from tokencache.core import ids
from tokencache.core.turn import Tokens, Turn, hash_ids
from tokencache.engine.model import Model
from tokencache.engine.pool import Pool
from tokencache.engine.template.renderer import RenderError
from tokencache.errors import EngineError

BATCH = 512
"""Ids in one request, which costs the engine one or two milliseconds."""

_PARTIAL = "\ufffd"
_LONGEST = 5
"""Tokens in one group: a character has four bytes, and the last token may begin the next one."""
_TIMEOUT = 5.0
_RETRY_AFTER = 5.0
"""Seconds until an engine that did not respond is queried again."""
_CACHED_TEXTS = 600_000

Kind = Literal["prompt", "earlier", "anchor", "tail", "sampled", "unscored"]
Piece = tuple[int, ...]


class Run(msgspec.Struct, frozen=True):
    """A half-open range of tokens of one kind. `turn` sampled them, or has them in its prompt."""

    start: int
    end: int
    kind: Kind
    turn: str


class SequenceLayout(msgspec.Struct, frozen=True):
    """A sequence: its turns, its packed ids, its runs, and the packed log probabilities of each turn, by turn id."""

    turns: tuple[Turn, ...]
    packed: bytes
    runs: tuple[Run, ...]
    packed_logprobs: Mapping[str, bytes]

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return ids.count(self.packed)

    def size(self) -> int:
        """Return the number of bytes of its ids and log probabilities."""
        return len(self.packed) + sum(map(len, self.packed_logprobs.values()))

    def ids(self, start: int, end: int) -> list[int]:
        """Return the ids of a range."""
        return ids.unpack(self.packed[start * ids.ID_BYTES : end * ids.ID_BYTES])

    def logprobs(self, start: int, end: int) -> list[float | None]:
        """Return the log probabilities of a range; `None` for every token with mask 0."""
        found: list[float | None] = [None] * (end - start)
        for turn in self.turns:
            first, last = turn.prompt_tokens, turn.prompt_tokens + turn.completion_tokens
            if first < end and last > start and is_scored(turn):
                low, high = max(first, start), min(last, end)
                values = zip(ids.unpack_logprobs(self.packed_logprobs[turn.id]), turn.chosen_mask(), strict=True)
                found[low - start : high - start] = [value if chosen else None for value, chosen in values][low - first : high - first]
        return found


def lay_out(line: Sequence[Turn], packed: bytes, tokens: Mapping[str, Tokens], turns: Mapping[str, Turn]) -> SequenceLayout:
    """Lay out a sequence: turns, each of which continues the one before, and the packed ids of the last one's prefix.

    `tokens` are those of each turn, by its id; without them the layout has no log probabilities. `turns` are all turns of the session.

    Raises:
        ValueError: the prefix does not match the hashes of the turns, so the records do not fit together.
    """
    for turn in line:
        if hash_ids(ids.head(packed, turn.prompt_tokens + turn.completion_tokens)) != turn.prefix_hash:
            raise ValueError(f"turn {turn.id}: the stored ids are not those that were recorded")
    runs: list[Run] = []
    for turn in line:
        if runs:
            _add(runs, runs[-1].end, turn.prompt_tokens, "tail", turn.id)
        else:
            _add_first_prompt(runs, turn, packed, turns)
        _add_completion(runs, turn)
    return SequenceLayout(tuple(line), packed, tuple(runs), {turn.id: tokens[turn.id].logprobs for turn in line if turn.id in tokens})


def _add_completion(runs: list[Run], turn: Turn) -> None:
    """Divide the completion of a turn into what the policy chose and what was forced."""
    at, first = turn.prompt_tokens, turn.prompt_tokens
    for start, end in turn.forced if is_scored(turn) else ():
        _add(runs, at, first + start, "sampled", turn.id)
        at = first + end
        _add(runs, first + start, at, "unscored", turn.id)
    _add(runs, at, first + turn.completion_tokens, "sampled" if is_scored(turn) else "unscored", turn.id)


def _add_first_prompt(runs: list[Run], turn: Turn, packed: bytes, turns: Mapping[str, Turn]) -> None:
    """Divide the prompt of a sequence's first turn into replies that were sampled elsewhere and the rest."""
    at = 0
    for start, end, kind, source in sorted(_replies(turn, packed, turns)):
        if start >= at and end <= turn.prompt_tokens:
            _add(runs, at, start, "prompt", turn.id)
            _add(runs, start, end, kind, source)
            at = end
    _add(runs, at, turn.prompt_tokens, "prompt", turn.id)


def _replies(turn: Turn, packed: bytes, turns: Mapping[str, Turn]) -> list[tuple[int, int, Kind, str]]:
    """Find the replies that a prompt holds with their exact ids: its anchors, and those of the turns that it extends."""
    found: list[tuple[int, int, Kind, str]] = [(anchor.start, anchor.end, "anchor", anchor.turn) for anchor in turn.anchors]
    before = turns.get(turn.parent or turn.origin or "")
    while before is not None:
        end = before.prompt_tokens + before.completion_tokens
        if end <= turn.prompt_tokens and hash_ids(ids.head(packed, end)) == before.prefix_hash:  # only a part of an origin may remain
            found.append((before.prompt_tokens, end, "earlier", before.id))
        before = turns.get(before.parent or before.origin or "")
    return found


def _add(runs: list[Run], start: int, end: int, kind: Kind, turn: str) -> None:
    if end > start:
        runs.append(Run(start, end, kind, turn))


class TextsUnavailable(Exception):  # noqa: N818 - not an error: the ids are shown without texts
    """The engine cannot decode the tokens. The message gives the reason."""


class TokenTexts:
    """Decodes single tokens with the engine, one request at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = asyncio.Lock()
        self._cache: dict[tuple[str, Piece], str] = {}
        self._unavailable: tuple[float, str] = (0.0, "")

    async def decode(self, model: str, tokens: Sequence[int]) -> list[str | None]:
        """Decode consecutive tokens; `None` for a token whose text belongs to the token before it.

        Raises:
            TextsUnavailable: the engine cannot decode them.
        """
        async with self._lock:
            if time.monotonic() < self._unavailable[0]:
                raise TextsUnavailable(self._unavailable[1])
            try:
                async with asyncio.timeout(_TIMEOUT):
                    return await self._decode(await self._pool.model(model), tokens)
            except (EngineError, RenderError, TimeoutError) as error:
                words = str(error) or "the engine does not answer"
                self._unavailable = (time.monotonic() + _RETRY_AFTER, words)
                raise TextsUnavailable(words) from error

    async def _decode(self, model: Model, tokens: Sequence[int]) -> list[str | None]:
        alone = await self._texts(model, {(token,) for token in tokens})
        partial = {i for i, token in enumerate(tokens) if _PARTIAL in alone[token,]}
        groups = {tuple(tokens[i : i + n]) for i in partial for n in range(2, _LONGEST + 1) if partial.issuperset(range(i, i + n))}
        whole = await self._texts(model, groups) if groups else {}
        texts: list[str | None] = []
        while len(texts) < len(tokens):
            at = len(texts)
            own = alone[tokens[at],]
            size = 1
            if _PARTIAL in own:
                sizes = (n for n in range(2, _LONGEST + 1) if _PARTIAL not in whole.get(tuple(tokens[at : at + n]), _PARTIAL))
                size = next(sizes, 1)
            texts += [own if size == 1 else whole[tuple(tokens[at : at + size])], *[None] * (size - 1)]
        return texts

    async def _texts(self, model: Model, pieces: set[Piece]) -> dict[Piece, str]:
        """Return the text of each piece, decoded by itself."""
        name = model.capability.model
        stop = min(model.stop_ids, default=None)
        if stop is None:
            raise RenderError("no stop id is known that could separate the tokens")
        if (name, (stop,)) not in self._cache:
            self._cache[name, (stop,)] = await model.renderer.read(name, ids.pack([stop]))
        batch: list[Piece] = []
        for piece in sorted(piece for piece in pieces if (name, piece) not in self._cache):
            batch.append(piece)
            if sum(map(len, batch)) >= BATCH:
                await self._request(model, stop, batch)
                batch = []
        await self._request(model, stop, batch)
        texts = {piece: self._cache[name, piece] for piece in pieces}
        if len(self._cache) > _CACHED_TEXTS:
            self._cache.clear()
        return texts

    async def _request(self, model: Model, stop: int, pieces: Sequence[Piece]) -> None:
        """Decode pieces in one request and cache their texts."""
        name = model.capability.model
        asked = [stop]
        for piece in pieces:
            asked += [*piece, stop]
        separator = self._cache[name, (stop,)]
        texts = (await model.renderer.read(name, ids.pack(asked))).split(separator) if pieces and separator else []
        if pieces and (len(texts) != len(pieces) + 2 or texts[0] or texts[-1]):
            raise RenderError("/detokenize does not keep tokens apart")
        self._cache |= {(name, piece): text for piece, text in zip(pieces, texts[1:-1], strict=True)}

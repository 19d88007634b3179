"""Finds out which policy version sampled each token of a reply, and which one computed its prompt.

The first source that speaks counts (`weights.VersionSource`):

1. the engine's own spans in the reply (`engine.reply`)
2. what the trainer announced of the engine, read when a request is sent and again when its reply has ended
3. the engine's `/weight_info` (vLLM with `VLLM_SERVER_DEV_MODE=1`), before and after the request; its value `default` names nothing
4. the name and path of the LoRA adapter (`/v1/models`), before and after the request. A label that the engine has too is appended to it,
   because it is that of the base model only

What a trainer announces does not concern an engine that serves only models that are not trained.

Two equal readings are one version for all tokens of the request. Two different ones are `mixed`: nothing shows after which token the
weights changed. A version is never guessed. Without a source, a reply has no spans; that is logged once for each engine.

While a trainer updates an engine, replies that end have only tokens of the version before, provided that the engine was paused first
(`weights.Update.mode`). Otherwise they are `mixed` too.

Keys and values are a different question: an engine may sample with new weights on keys and values of older ones. `kv_salt` prevents that
for each new request. It cannot help a reply that is under way while the weights change: that is marked (`stale-kv`), unless the update is
known to be harmless (`weights.Update.harmless`).
"""

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

import msgspec

from tokencache.core.turn import TurnMark
from tokencache.core.weights import MIXED, RESERVED, VersionSource, WeightSpan, WeightsState, merged, read_spans
from tokencache.engine.announced_weights import AnnouncedWeights
from tokencache.engine.model import Engine, Model
from tokencache.engine.upstream import EngineResponse
from tokencache.errors import EngineError, WeightsUpdatingError
from tokencache.proxy.kv_salt import NO_SALT, KvPolicy, KvSalt, KvSalts, SaltedRequest
from tokencache.store.base import StoreError

log = logging.getLogger(__name__)

UNKNOWN_HINT = (
    "the policy version of its tokens is not known, and its prefix cache may have keys and values of older weights: announce each version "
    "(PUT /tokencache/v1/weights, client.set_weights or tokencache weights set) before the first rollout (docs/weights.md)"
)
"""What to do if no source reports a version."""
_SECONDS = 5.0
"""Seconds to wait for an engine's report of its version."""


class Reading(NamedTuple):
    """What is known of an engine's weights at one moment.

    Attributes:
        version: the version; `""` if it is not known, `MIXED` if its source did not answer.
        source: who reports it; `""` if nobody does.
        last: in that case, the version that was known last.
        update: the ordinal of the trainer's announcement.
        updating: whether the trainer updates the engine.
        state: all that is announced.
    """

    version: str = ""
    source: VersionSource | Literal[""] = ""
    last: str = ""
    update: int = 0
    updating: bool = False
    state: WeightsState = WeightsState()


UNREPORTED = Reading()
"""No source reports a version."""


class PieceVersions(NamedTuple):
    """The versions of the tokens that one request to an engine sampled, or of a whole reply.

    Attributes:
        spans: cover the tokens, which are counted from 0; none if no version is known.
        source: who reported them.
        prompt: the version that computed the prompt's keys and values; `MIXED` if that is not certain, `""` if it is not known.
        kv: how the prefix cache was kept apart by version (`Turn.kv`).
        stale: whether keys and values of older weights may have been used for the later tokens.
        hybrid: whether the prompt was computed with older weights, as `--kv session` permits.
    """

    spans: Sequence[WeightSpan] = ()
    source: VersionSource | Literal[""] = ""
    prompt: str = ""
    kv: KvPolicy | Literal[""] = ""
    stale: bool = False
    hybrid: bool = False

    def marks(self) -> list[TurnMark]:
        """The marks of the turn."""
        if self is NOTHING_KNOWN:
            return []
        found = {
            TurnMark.MIXED_WEIGHTS: any(span.version == MIXED for span in self.spans),
            TurnMark.HYBRID_KV: self.hybrid,
            TurnMark.STALE_KV: self.stale,
        }
        return [mark for mark, there in found.items() if there]


NOTHING_KNOWN = PieceVersions()


class VersionReading(msgspec.Struct, eq=False):
    """The readings for one request to an engine: one when it is sent, one when its reply has ended.

    Attributes:
        before: the first reading.
        salt: the salt of the request.
        source: reads again, for this engine and model; `None` if there is nothing to read.
        after: the second reading; `None` if there is none.
    """

    before: Reading
    salt: KvSalt
    source: "tuple[PolicyVersions, Engine, Model | None] | None" = None
    after: Reading | None = None

    async def end(self) -> None:
        """Read again, once, as soon as the engine's reply has ended or was broken off."""
        if self.source is not None:
            versions, engine, model = self.source
            self.after = await versions.read(engine, model)
            self.source = None

    def versions(self, reported: Sequence[Any], tokens: int) -> PieceVersions:
        """Judge the readings; call `end` before.

        Args:
            reported: the engine's own spans (`Reply.versions`).
            tokens: number of sampled tokens.
        """
        before, after = self.before, self.after or self.before
        if after is before is UNREPORTED and not reported:  # most calls of a proxy to which nobody announces anything
            return NOTHING_KNOWN
        same = (before.version, before.update) == (after.version, after.update) and before.version != MIXED
        if same and after.updating:
            same = after.state.update is not None and bool(after.state.update.mode)
        spans = read_spans(reported, tokens, constant=same)
        source: VersionSource | Literal[""] = VersionSource.REPLY
        if not spans:
            version = before.version if same else MIXED
            spans = [WeightSpan(version, 0, tokens)] if version and tokens else []
            source = before.source or after.source
        changed = not same or len({span.version for span in spans}) > 1
        return PieceVersions(
            spans=spans,
            source=source if spans else "",
            prompt=self._prompt_version(spans, same=same),
            kv=self.salt.kv if before.version else "",
            stale=changed and bool(tokens) and not self._harmless(),
            hybrid=self.salt.hybrid,
        )

    def _prompt_version(self, spans: Sequence[WeightSpan], *, same: bool) -> str:
        version = self.before.version
        if not version or not self.salt.keeps_versions_apart:
            return MIXED if version else ""
        computed = spans[0].version if spans else version
        return version if computed == version and (same or bool(spans)) else MIXED

    def _harmless(self) -> bool:
        """Whether no token was sampled on keys and values of older weights, although the weights changed."""
        before, after = self.before, self.after or self.before
        return before.source == VersionSource.TRAINER and before.update > 0 and after.state.harmless_since(before.update)


def joined(pieces: Sequence[tuple[PieceVersions, int]]) -> PieceVersions:
    """Join the versions of the pieces of one reply; each with its number of tokens.

    If only some pieces have versions, the tokens of the others are `MIXED`.
    """
    if not any(piece.spans for piece, _ in pieces):
        return pieces[0][0]
    spans, start = [], 0
    for piece, tokens in pieces:
        own = piece.spans or [WeightSpan(MIXED, 0, tokens)]
        spans += [WeightSpan(span.version, span.start + start, span.end + start) for span in own]
        start += tokens
    return PieceVersions(
        spans=merged(spans),
        source=next(piece.source for piece, _ in pieces if piece.source),
        prompt=pieces[0][0].prompt,
        kv=pieces[0][0].kv,
        stale=any(piece.stale for piece, _ in pieces),
        hybrid=any(piece.hybrid for piece, _ in pieces),
    )


class PolicyVersions:
    """Reads the version of each request's engine.

    Args:
        announced: what the trainers announced.
        salts: makes the salts of requests.

    Attributes:
        changed: wakes those who wait for an update of weights to end.
    """

    def __init__(self, announced: AnnouncedWeights, salts: KvSalts) -> None:
        self._announced, self._salts = announced, salts
        self.changed = announced.changed
        self._logged: set[str] = set()

    async def read(self, engine: Engine, model: Model | None) -> Reading:
        """Read what is known now of an engine's weights; costs nothing if there is no source."""
        url = engine.upstream.url
        if self._announced.known.revision and (not engine.frozen or engine.trains):
            try:
                state = await self._announced.current()
            except StoreError as why:
                log.warning("engine %s: what is announced of its weights cannot be read: %s", url, why)
                known = self._announced.known.of(url)
                return Reading(MIXED, VersionSource.TRAINER, known.version, known.update, state=self._announced.known)
            known = state.of(url)
            if known.update or known.updating:
                return Reading(known.version, VersionSource.TRAINER, "", known.update, known.updating, state)
        label = await _weight_label(engine) if engine.weight_label not in RESERVED else ""
        if model is not None and model.capability.adapter:  # the label is that of the base model only
            own = await _adapter(engine, model.capability.model)
            version = MIXED if MIXED in {own, label} else own if label in RESERVED else f"{own}+{label}"
            return Reading(version, VersionSource.ADAPTER)
        if label:
            return Reading("" if label in RESERVED - {MIXED} else label, VersionSource.ENGINE)
        if url not in self._logged:
            self._logged.add(url)
            log.info("engine %s: %s", url, UNKNOWN_HINT)
        return UNREPORTED

    async def begin(self, engine: Engine, model: Model | None, request: SaltedRequest) -> VersionReading:
        """Read what is known now of an engine's weights, for a request that is about to be sent to it, and make its salt.

        Raises:
            WeightsUpdatingError: a trainer updates the engine's weights: the request must wait.
        """
        before = await self.read(engine, model)
        if before.updating:
            raise WeightsUpdatingError(engine.upstream.url, before.state.update.owner if before.state.update is not None else "")
        if not before.source:
            # Anything may be announced while the reply is sampled. That costs nothing to ask, unless there is an adapter.
            return VersionReading(before, NO_SALT, (self, engine, model))
        version = before.last if before.version == MIXED else before.version
        salt = await self._salts.salt(request, version, before.update)
        return VersionReading(before, salt, (self, engine, model))


class _Card(msgspec.Struct):
    id: str
    root: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


async def _weight_label(engine: Engine) -> str:
    """Return the engine's own label of its weights; `MIXED` if it does not answer."""
    label = engine.driver.weight_label(await _asked(engine, engine.driver.weights_route))
    return MIXED if label is None else label


async def _adapter(engine: Engine, name: str) -> str:
    """Return name and path of a LoRA adapter; `MIXED` if the engine does not answer, or no longer lists it."""
    answer = await _asked(engine, "/v1/models")
    if answer.status != HTTPStatus.OK:
        return MIXED
    try:
        root = next(card.root for card in msgspec.json.decode(answer.body, type=_Cards).data if card.id == name)
    except (ValueError, StopIteration):
        return MIXED
    return f"{name}@{root}"


async def _asked(engine: Engine, path: str) -> EngineResponse:
    """Return the engine's answer; an empty one with status 504 if there is none in time."""
    try:
        async with asyncio.timeout(_SECONDS):
            return await engine.upstream.get(path)
    except (EngineError, TimeoutError):
        return EngineResponse(HTTPStatus.GATEWAY_TIMEOUT, b"")

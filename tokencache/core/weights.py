"""Policy versions: which weights sampled a token, and what the trainer announced about the weights of each engine.

A *policy version* is the trainer's name for a state of the weights. An *update* is an ordinal that increases with every announcement, so
that a version which is set back to an earlier name is still told apart from it: nothing says that the weights are the same again.

Where the version of a token is not certain, its span has the version `MIXED`. A version is never guessed: without any source, a reply has
no spans.

`WeightsState` is a value. Its methods are the legal transitions; each returns the next state, with the next revision, for a store that
replaces a state only if nobody else did (`Store.replace_weights`).
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

import msgspec

PauseMode = Literal["abort", "keep", "wait", "none"]
"""How engines are paused while their weights are replaced: vLLM's modes (`/pause?mode=`), or not at all."""
MIXED = "mixed"
"""The version of a span that is not certain: the weights changed, or may have changed, while it was sampled."""
RESERVED = frozenset({"", MIXED, "default"})
"""Names that no version may have. `default` is what vLLM's `/weight_info` answers before anything was set (0.27 to 0.33)."""
HISTORY_KEPT = 100
"""Number of announced versions that are kept."""
RESUME_SECONDS = 30.0
"""Seconds for which the replica that ends an update may be resuming engines. After that, another one tries it again."""
MAX_NAME = 200
"""Maximum number of characters of a version, and of an owner."""


class WeightsPhase(StrEnum):
    """What an engine's weights are."""

    READY = "ready"
    """One version, which the trainer announced."""
    UPDATING = "updating"
    """They are being replaced: new calls wait."""
    UNKNOWN = "unknown"
    """Nothing was announced, or an update ended without a version."""


class VersionSource(StrEnum):
    """Who reported the version of a turn's tokens, the first that speaks."""

    REPLY = "reply"
    """The engine's own report in the reply."""
    TRAINER = "trainer"
    """The trainer announced it."""
    ENGINE = "engine"
    """The engine's `/weight_info` before and after the call."""
    ADAPTER = "adapter"
    """The name and path of the LoRA adapter."""


class UpdateConflictError(Exception):
    """Another owner is updating the weights, or the update that a caller names is not under way.

    Attributes:
        update: the update that is under way; `None` if there is none.
    """

    def __init__(self, update: "Update | None" = None) -> None:
        super().__init__(update)
        self.update = update


class WeightSpan(msgspec.Struct, frozen=True):
    """A half-open range of a completion's tokens that one version sampled."""

    version: str
    start: int
    end: int


class EngineWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is announced of one engine, or of all that have no entry of their own.

    Attributes:
        version: the version; `""` if it is not known.
        update: the ordinal of the announcement; 0 if there was none.
        updating: whether its weights are being replaced.
        at: when it was announced, Unix time in seconds. An engine that was started later has other weights: those on its disk.
    """

    version: str = ""
    update: int = 0
    updating: bool = False
    at: float = 0.0

    @property
    def phase(self) -> WeightsPhase:
        """The phase."""
        if self.updating:
            return WeightsPhase.UPDATING
        return WeightsPhase.READY if self.version else WeightsPhase.UNKNOWN


class Update(msgspec.Struct, frozen=True, omit_defaults=True):
    """An update that is under way.

    Attributes:
        id: names it in requests.
        owner: the trainer that began it.
        since, until: when it began, and when it ends by itself, Unix time in seconds.
        engines: base URLs of its engines; empty for all.
        paused: whether the proxy paused the engines, and must resume them at its end.
        mode: how the engines are paused before any weight changes: `abort`, `keep` or `wait` (`/pause?mode=`); `""` if that is not known.
        clears_cache: whether the pause empties the prefix cache, and computes the keys and values of frozen requests again.
        ended: whether it has ended, except that the engines that the proxy paused are not all resumed yet. `until` is then when any
            replica may try that again.
    """

    id: str
    owner: str
    since: float
    until: float
    engines: tuple[str, ...] = ()
    paused: bool = False
    mode: str = ""
    clears_cache: bool = False
    ended: bool = False

    @property
    def harmless(self) -> bool:
        """Whether no reply is sampled on keys and values of the weights before: none is under way, or all are computed again."""
        return self.mode in {"abort", "wait"} or (self.mode == "keep" and self.clears_cache)

    def covers(self, url: str) -> bool:
        """Whether this engine takes part in it."""
        return not self.engines or url in self.engines


class Announced(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version that was announced: its update, and when, Unix time in seconds.

    `harmless` is as in the `Update` that it ended, and `id` is that of this `Update`; `""` if it ended none.
    """

    version: str
    update: int
    at: float
    harmless: bool = False
    id: str = ""


class WeightsState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the trainers announced about the weights.

    Attributes:
        revision: number of changes of this value; 0 if nothing was ever announced.
        all: what holds for engines without an entry of their own.
        engines: base URL → what holds for this engine.
        update: the update under way; `None` if there is none.
        last: the newest update's ordinal. The first one is the time of its announcement in milliseconds, so that a store that lost its
            data does not use an ordinal again.
        history: announced versions, the newest last.
    """

    revision: int = 0
    all: EngineWeights = EngineWeights()
    engines: Mapping[str, EngineWeights] = {}
    update: Update | None = None
    last: int = 0
    history: tuple[Announced, ...] = ()

    def of(self, url: str) -> EngineWeights:
        """Return what is announced of an engine."""
        known = self.engines.get(url, self.all)
        updating = self.update is not None and not self.update.ended and self.update.covers(url)
        return msgspec.structs.replace(known, updating=True) if updating else known

    @property
    def current(self) -> str:
        """The version that was announced last; `""` if none was, or if an update ended without one."""
        return self.history[-1].version if self.history and self.history[-1].update == self.last else ""

    @property
    def under_way(self) -> Update | None:
        """The update that has not ended."""
        return None if self.update is None or self.update.ended else self.update

    def announce(
        self, version: str, at: float, *, engines: Sequence[str] = (), owner: str = "", lost: Iterable[str] = ()
    ) -> "WeightsState":
        """Set the version of some engines, or of all, and end the update that is under way if it is `owner`'s.

        Args:
            version: the version.
            at: now.
            engines: base URLs; empty for all.
            owner: who announces it.
            lost: those of the engines that do not answer. Nothing shows which weights they have when they come back.

        Returns:
            The next state; this one if the same version was announced for the same engines and no update is under way.

        Raises:
            ValueError: the version cannot be used.
            UpdateConflictError: another owner's update is under way.
        """
        check_version(version)
        self._check_owner(owner, at)
        state = self.expire(at)
        if state.under_way is None and state._same(version, engines):  # noqa: SLF001 - a state of this class
            return state
        return _with_version(state, version, at, engines or (state.under_way.engines if state.under_way is not None else ()), lost)

    def begin_update(self, update: Update) -> "WeightsState":
        """Begin an update. Returns this state if it is under way already.

        An update of the same owner ends before, without a version: it may have replaced some weights.

        Raises:
            UpdateConflictError: another owner's update is under way, or engines that it paused are being resumed.
        """
        if self.under_way is not None and self.under_way.id == update.id:
            return self
        self._check_owner(update.owner, update.since)
        if self.under_way is not None:
            return _with_version(self, "", update.since, self.under_way.engines)._begin(update)  # noqa: SLF001 - a state of this class
        return self._begin(update)

    def _begin(self, update: Update) -> "WeightsState":
        return msgspec.structs.replace(self, revision=self.revision + 1, update=update)

    def end_update(self, name: str, version: str, at: float, *, lost: Iterable[str] = ()) -> "WeightsState":
        """End an update with the version of the new weights, or with `""` if they are not known. `lost` as in `announce`.

        Raises:
            ValueError: the version cannot be used.
            UpdateConflictError: the update is not under way.
        """
        if version:
            check_version(version)
        if self.under_way is None or self.under_way.id != name or self.under_way.until <= at:
            raise UpdateConflictError
        return _with_version(self, version, at, self.under_way.engines, lost)

    def resumed(self, name: str) -> "WeightsState":
        """Note that the engines of an update that has ended are resumed."""
        if self.update is None or not self.update.ended or self.update.id != name:
            return self
        return msgspec.structs.replace(self, revision=self.revision + 1, update=None)

    def postponed(self, name: str, at: float) -> "WeightsState":
        """Note that one replica tries again to resume the engines of an update that has ended."""
        if self.update is None or not self.update.ended or self.update.id != name or self.update.until > at:
            return self
        update = msgspec.structs.replace(self.update, until=at + RESUME_SECONDS)
        return msgspec.structs.replace(self, revision=self.revision + 1, update=update)

    def restarted(self, engines: Iterable[str], at: float) -> "WeightsState":
        """Forget the versions of engines that were started after these were announced. Returns this state if there are none."""
        forgotten = {url: EngineWeights(at=at) for url in engines if self.of(url).version}
        if not forgotten:
            return self
        return msgspec.structs.replace(self, revision=self.revision + 1, engines={**self.engines, **forgotten})

    def cancel_update(self, name: str) -> "WeightsState":
        """End an update before any weight was changed: what was announced before holds on.

        Raises:
            UpdateConflictError: the update is not under way.
        """
        if self.under_way is None or self.under_way.id != name:
            raise UpdateConflictError
        return msgspec.structs.replace(self, revision=self.revision + 1, update=None)

    def ended_with(self, name: str) -> str:
        """Return the version with which an update ended; `""` if that is not known."""
        return next((one.version for one in self.history if one.id == name), "")

    def expire(self, at: float) -> "WeightsState":
        """End the update whose timeout has passed: the weights of its engines are not known. Returns this state if there is none."""
        if self.under_way is None or self.under_way.until > at:
            return self
        return _with_version(self, "", at, self.under_way.engines)

    def harmless_since(self, update: int) -> bool:
        """Whether all updates after this ordinal, and one that is under way, are known to be harmless (`Update.harmless`)."""
        later = [one for one in self.history if one.update > update]
        ended = len(later) == self.last - update and all(one.harmless for one in later)  # one that ended without a version is not listed
        return ended and (self.under_way is None or self.under_way.harmless)

    def _check_owner(self, owner: str, at: float) -> None:
        if self.update is not None and self.update.until > at and (self.update.owner != owner or self.update.ended):
            raise UpdateConflictError(self.update)

    def _same(self, version: str, engines: Sequence[str]) -> bool:
        if engines:
            return all(self.of(url).version == version for url in engines)
        return self.all.version == version and all(known.version == version for known in self.engines.values())


def _with_version(state: WeightsState, version: str, at: float, engines: Sequence[str], lost: Iterable[str] = ()) -> WeightsState:
    """Set a version by a new update, which ends the one that is under way. If the proxy paused its engines, they are to be resumed."""
    number = state.last + 1 if state.last else int(at * 1000) or 1
    known = EngineWeights(version, number, at=at)
    unknown = dict.fromkeys((url for url in lost if not engines or url in engines), EngineWeights("", number, at=at))
    update = state.under_way
    announced = (Announced(version, number, at, update is not None and update.harmless, update.id if update is not None else ""),)
    ended = None
    if update is not None and update.paused:
        ended = msgspec.structs.replace(update, ended=True, until=at + RESUME_SECONDS)
    return msgspec.structs.replace(
        state,
        revision=state.revision + 1,
        all=state.all if engines else known,
        engines={**state.engines, **dict.fromkeys(engines, known), **unknown} if engines else unknown,
        update=ended,
        last=number,
        history=(*state.history, *(announced if version else ()))[-HISTORY_KEPT:],
    )


def check_version(version: str) -> None:
    """Check the name of a version.

    Raises:
        ValueError: it is reserved, too long, or has other characters than printable ones.
    """
    if version in RESERVED:
        raise ValueError(f"{version!r} cannot name a version of the weights")
    if len(version) > MAX_NAME or not version.isprintable() or version.strip() != version:
        raise ValueError(f"a version has at most {MAX_NAME} printable characters, without blanks at its ends")


def read_spans(reported: Iterable[Any], tokens: int, *, constant: bool = False) -> list[WeightSpan]:
    """Read the spans that an engine reports for a completion.

    Args:
        reported: objects with `version`, `start` and `end` (vLLM 0.33, SGLang).
        tokens: number of tokens of the completion.
        constant: whether the weights did not change meanwhile. Then a version without `start` and `end` is that of all tokens.

    Returns:
        Spans that cover the completion in order. A gap, or a span without a usable version, is `MIXED`. Empty if nothing is readable, or
        if the only version is one that names nothing (`default`).
    """
    spans: list[WeightSpan] = []
    covered = 0
    for item in reported:
        if constant and isinstance(item, Mapping) and not {"start", "end"} & item.keys():
            item = {**item, "start": 0, "end": tokens}  # noqa: PLW2901 - completed
        if not isinstance(item, Mapping) or not isinstance(item.get("start"), int) or not isinstance(item.get("end"), int):
            return []
        version = str(item.get("version", ""))
        start, end = max(item["start"], covered), min(item["end"], tokens)
        if start < end:
            spans += [WeightSpan(MIXED, covered, start), WeightSpan(MIXED if version in RESERVED else version, start, end)]
            covered = end
    spans.append(WeightSpan(MIXED, covered, tokens))
    return merged(spans) if any(span.version != MIXED for span in spans) else []


def merged(spans: Iterable[WeightSpan]) -> list[WeightSpan]:
    """Merge spans of the same version that follow one another, and leave empty ones out."""
    found: list[WeightSpan] = []
    for span in spans:
        if span.start == span.end:
            continue
        if found and found[-1].version == span.version and found[-1].end == span.start:
            found[-1] = WeightSpan(span.version, found[-1].start, span.end)
        else:
            found.append(span)
    return found


def lag(version: str, current: str, history: Sequence[Announced] = ()) -> int | None:
    """Return how many versions older than the current one a version is; `None` if that is not known.

    If both are whole numbers, it is their difference. Otherwise it is the number of announcements since the version was announced last.
    """
    if version in RESERVED or current in RESERVED:
        return None
    if version.isdecimal() and current.isdecimal():
        return int(current) - int(version)
    names = [one.version for one in history]
    if version not in names or current not in names:
        return None
    last = {name: place for place, name in enumerate(names)}
    return last[current] - last[version]


def in_order(versions: Iterable[str], history: Sequence[Announced] = ()) -> list[str]:
    """Return versions from the oldest to the newest; empty if their order is not known.

    Whole numbers are in the order of their values. Other names are in the order in which they were announced last.
    """
    names = list(dict.fromkeys(versions))
    if all(name.isdecimal() for name in names):
        return sorted(names, key=int)
    last = {one.version: place for place, one in enumerate(history)}
    known = len(names) == 1 or all(name in last for name in names)
    return sorted(names, key=lambda name: last.get(name, 0)) if known else []

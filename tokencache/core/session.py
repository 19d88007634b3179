"""Defines what belongs to a session besides its turns: its state, its settings with their limits, its labels and its rewards.

Every value is checked when it is made, so a request that is decoded into one of these types is valid, or msgspec reports what is wrong.

A limit of the budget is checked when a call begins, never during a call: a reply that is cut at the limit is no longer a sample of the
policy. So calls that are in progress may exceed it.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import xxhash
from msgspec import UNSET, Meta, UnsetType

MAX_GROUP = 200
"""Characters of a group's name."""
MAX_METADATA = 16 * 1024
"""Bytes of metadata, encoded as JSON."""
MAX_TAGS, MAX_TAG = 32, 100
"""Number of tags, and characters of a tag."""
MAX_COMPONENTS = 100
"""Named components of a reward."""
MAX_REWARD = 1e300
"""Largest absolute value of a reward."""
REWARDS_KEPT = 100
"""Rewards of a session that a store keeps, the newest ones."""


class SessionStage(StrEnum):
    """The life cycle of a session. There is no way back.

    `open`      accepts calls
    `finished`  accepts no new calls; calls in flight end normally and are recorded
    `sealed`    no call is in flight: what is recorded does not change any more, unless the session was sealed by force
    """

    OPEN = "open"
    FINISHED = "finished"
    SEALED = "sealed"


History = Literal["supply", "follow"]
"""Whether earlier replies keep their thinking in the prompt, or only what the chat template shows of them."""


_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Seconds = Annotated[float, Meta(ge=0)]


class Budget(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one session: calls, sampled tokens, seconds since its first call. 0 means no limit, `None` means not set."""

    calls: _Count | None = None
    tokens: _Count | None = None
    seconds: _Seconds | None = None

    def __bool__(self) -> bool:
        """Whether any limit is set."""
        return bool(self.calls or self.tokens or self.seconds)

    def over(self, other: "Budget") -> "Budget":
        """Return this budget, with the other's limits where this one has `None`."""
        return Budget(
            self.calls if self.calls is not None else other.calls,
            self.tokens if self.tokens is not None else other.tokens,
            self.seconds if self.seconds is not None else other.seconds,
        )

    def spent(self, *, calls: int, tokens: int, seconds: float) -> str:
        """Describe the limit that is used up; `""` if another call is allowed.

        `calls` includes the new call. `tokens` are the sampled tokens of the recorded turns. `seconds` have passed since the first call.
        """
        if self.calls and calls > self.calls:
            return f"{self.calls} calls"
        if self.tokens and tokens >= self.tokens:
            return f"{self.tokens} tokens ({tokens} were sampled)"
        if self.seconds and seconds >= self.seconds:
            return f"{self.seconds:g} seconds ({seconds:.1f} have passed)"
        return ""


class SessionSettings(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What holds for every call of a session, however the call names the session.

    Attributes:
        harness: name of the harness adapter whose rules apply.
        models: maps model names that the harness requests (shell patterns) to served models.
        sampling: sampling parameters that replace what the harness requests.
        budget: limits of the session.
        tenant: owner of the session. Tenants do not share entries of the engine's prefix cache.
        history: `follow` omits thinking from earlier replies where the chat template does, `supply` keeps it. `""` is the proxy's default.
        deadline: when the session is finished at the latest, as Unix time in seconds; 0 for never.
        silent_for: seconds without a call after which it is finished; 0 for no limit.
    """

    harness: str = ""
    models: dict[str, str] = {}
    sampling: dict[str, Any] = {}
    budget: Budget = Budget()
    tenant: str = ""
    history: History | Literal[""] = ""
    deadline: float = 0.0
    silent_for: float = 0.0

    def __bool__(self) -> bool:
        """Whether anything is set."""
        return self != SessionSettings()

    @property
    def digest(self) -> bytes:
        """Identify these settings by 16 bytes (xxh3-128 of their JSON); `b""` if nothing is set."""
        unset = SessionSettings()
        if self == unset:
            return b""
        members = {name: getattr(self, name) for name in self.differences(unset)}
        return xxhash.xxh3_128_digest(msgspec.json.encode(members, order="deterministic"))

    def seconds_left(self, now: float, *, silent: float = 0.0) -> float | None:
        """Return after how many seconds the session must be looked at: its time may then be up. `None` without such limits.

        `now` is Unix time in seconds. No call began or ended for `silent` seconds.
        """
        ends = [self.deadline - now] if self.deadline else []
        ends += [self.silent_for - silent] if self.silent_for else []
        return min(ends, default=None)

    def time_up(self, now: float, *, silent: float, busy: bool) -> str:
        """Say why the time of the session is up; `""` if it is not. A session with a call in flight (`busy`) is not silent."""
        if self.deadline and now >= self.deadline:
            return f"its deadline passed at {self.deadline:.0f} (Unix time)"
        if self.silent_for and silent >= self.silent_for and not busy:
            return f"no call began or ended for {self.silent_for:g} seconds"
        return ""

    def differences(self, other: "SessionSettings") -> tuple[str, ...]:
        """Name the members that differ."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name))


class Labels(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the trainer notes about a session. Nothing of it changes how a call is served.

    Attributes:
        group: sessions that are compared with each other, such as the samples of one prompt (GRPO). At most 200 printable characters;
            `""` if the session belongs to none.
        metadata: a JSON object of at most 16 KiB, with finite numbers.
        tags: at most 32 strings of 1 to 100 characters, without blanks at the ends.

    Raises:
        ValueError: a bound is exceeded. msgspec reports it as a `ValidationError` of the request.
    """

    group: str = ""
    metadata: dict[str, Any] = {}
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the bounds."""
        check_labels(self.group, self.metadata, self.tags)

    @property
    def changes(self) -> "LabelChanges":
        """The changes that these labels make to others: the members that are not empty."""
        return LabelChanges(**{name: value for name in self.__struct_fields__ if (value := getattr(self, name))})

    def changed(self, changes: "LabelChanges") -> "Labels":
        """Return these labels with the members that `changes` gives."""
        return msgspec.structs.replace(self, **changes.given)


_Group = Annotated[str, Meta(description="Group: the rollouts of one prompt, as in GRPO.", extra={"metavar": "NAME"})]
_Metadata = Annotated[dict[str, Any], Meta(description="Metadata: a JSON object.")]
_Tags = Annotated[tuple[str, ...], Meta(description="A tag; there may be several.", extra={"option": "--tag", "metavar": "TAG"})]


class LabelChanges(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """New values of labels. A member that is given replaces the old value as a whole; others stay.

    Attributes:
        group, metadata, tags: as in `Labels`.

    Raises:
        ValueError: a bound is exceeded.
    """

    group: _Group | UnsetType = UNSET
    metadata: _Metadata | UnsetType = UNSET
    tags: _Tags | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Check the bounds."""
        check_labels(self.group or "", self.metadata or {}, self.tags or ())

    @property
    def given(self) -> dict[str, Any]:
        """The members that are given."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET}


_Deadline = Annotated[float, Meta(le=1e11)]
_Silence = Annotated[float, Meta(gt=0, le=30 * 86400.0)]
_FinishAt = Annotated[
    _Deadline | None, Meta(description="Finish it at this Unix time at the latest, as a timeout.", extra={"metavar": "TIME"})
]
_FinishAfter = Annotated[_Silence | None, Meta(description="Finish it after so many seconds without a call, as a timeout.")]


class NewSession(msgspec.Struct, frozen=True):
    """A session to create: the body of the request, the options of `Client.create` and of `tokencache create`."""

    session: str | None = None
    harness: Annotated[str, Meta(description="Harness whose rules apply; `tokencache harnesses` lists all.", extra={"metavar": "NAME"})] = (
        ""
    )
    models: Annotated[
        dict[str, str], Meta(description="Maps names that the harness may request (shell patterns) to the model that is served.")
    ] = {}
    sampling: Annotated[dict[str, Any], Meta(description='Sampling parameters that override the harness\'s: {"temperature": 1}.')] = {}
    budget: Annotated[Budget, Meta(description='Limits after which it ends: {"calls": 50, "tokens": 100000, "seconds": 600}.')] = Budget()
    tenant: Annotated[str, Meta(description="Owner. Tenants do not share the prefix cache of the engine.", extra={"metavar": "NAME"})] = ""
    history: Annotated[
        History | Literal[""],
        Meta(
            description="Keep the thinking of earlier replies (supply), or omit it where the chat template does (follow). "
            "Default: the proxy's."
        ),
    ] = ""
    deadline: _FinishAt = None
    silent_for: _FinishAfter = None
    group: _Group = ""
    metadata: _Metadata = {}
    tags: _Tags = ()
    exist_ok: Annotated[bool, Meta(description="Accept a session that exists, if it has the same settings or none are given.")] = False

    @property
    def settings(self) -> SessionSettings:
        """Its settings."""
        limits = self.deadline or 0.0, self.silent_for or 0.0
        return SessionSettings(self.harness, self.models, self.sampling, self.budget, self.tenant, self.history, *limits)

    @property
    def labels(self) -> Labels:
        """Its labels.

        Raises:
            ValueError: a bound is exceeded.
        """
        return Labels(self.group, self.metadata, self.tags)


class NewFork(msgspec.Struct, frozen=True):
    """A session to fork: the body of the request, the options of `Session.fork` and of `tokencache fork`.

    Attributes:
        turn: the id of the turn after which it begins.
        session: its name. Default: a new, random one.
    """

    turn: str
    session: str | None = None
    deadline: _FinishAt = None
    silent_for: _FinishAfter = None
    group: _Group = ""
    metadata: _Metadata = {}
    tags: _Tags = ()

    def of(self, settings: SessionSettings) -> NewSession:
        """Return the session to create: with the settings of the one that is forked, but limits of time of its own."""
        given = {name: getattr(self, name) for name in ("session", "deadline", "silent_for", "group", "metadata", "tags")}
        kept = {name: getattr(settings, name) for name in ("harness", "models", "sampling", "budget", "tenant", "history")}
        return NewSession(**given, **kept)


def check_labels(group: str, metadata: Mapping[str, Any], tags: tuple[str, ...]) -> None:
    """Check the bounds of `Labels`.

    Raises:
        ValueError: one is exceeded.
    """
    if len(group) > MAX_GROUP or not group.isprintable():
        raise ValueError(f"`group` must have at most {MAX_GROUP} characters, all printable")
    if len(tags) > MAX_TAGS:
        raise ValueError(f"`tags` must be at most {MAX_TAGS}")
    for tag in tags:
        if not tag or len(tag) > MAX_TAG or tag != tag.strip() or not tag.isprintable():
            raise ValueError(f"a tag must have 1 to {MAX_TAG} printable characters and no blanks at the ends, unlike {tag[:MAX_TAG]!r}")
    if metadata:
        try:
            finite, size = _finite(metadata), len(msgspec.json.encode(metadata))
        except (TypeError, ValueError, OverflowError, RecursionError) as why:
            raise ValueError(f"`metadata` must be a JSON object: {why}") from None
        if not finite:
            raise ValueError("`metadata` must not contain NaN or infinite numbers")
        if size > MAX_METADATA:
            raise ValueError(f"`metadata` must have at most {MAX_METADATA} bytes as JSON, not {size}")


def _finite(value: object) -> bool:
    match value:
        case float():
            return math.isfinite(value)
        case Mapping():
            return all(map(_finite, value.values()))
        case list() | tuple():
            return all(map(_finite, value))
        case _:
            return True


Number = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
"""A reward: finite, at most 1e300 in absolute value."""


class Reward(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reward of a session. A later one replaces it as a whole.

    Attributes:
        reward: of the whole session; `None` if there is none.
        components: named parts of it, at most 100.
        turns: rewards of turns, by the turn's id.
        sequences: rewards of sequences, by the sequence's id.
        at: when it was set, as Unix time in seconds.
        recorded: if it has rewards of sequences, how many turns the session had when they were checked; otherwise 0. Later turns may join
            a sequence to another one.

    Raises:
        ValueError: a number is NaN, infinite or beyond 1e300, or there are too many components.
    """

    reward: Number | None = None
    components: dict[str, Number] = {}
    turns: dict[str, Number] = {}
    sequences: dict[str, Number] = {}
    at: float = 0.0
    recorded: int = 0

    def __post_init__(self) -> None:
        """Check the bounds, for values that msgspec did not decode."""
        if len(self.components) > MAX_COMPONENTS:
            raise ValueError(f"`components` must be at most {MAX_COMPONENTS}")
        numbers = [*self.components.values(), *self.turns.values(), *self.sequences.values()]
        if self.reward is not None:
            numbers.append(self.reward)
        if not all(abs(number) <= MAX_REWARD for number in numbers):  # false for NaN
            raise ValueError(f"a reward must be a finite number of at most {MAX_REWARD:g} in absolute value")

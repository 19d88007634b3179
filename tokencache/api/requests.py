"""Defines the bodies of the requests that end, reward and score sessions, use the queue and announce weights.

`core.session` has the others.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tokencache.core.context_edits import MOST_EDITS, Edit
from tokencache.core.outcome import Outcome
from tokencache.core.session import LabelChanges, Number, Reward
from tokencache.core.weights import PauseMode
from tokencache.scoring.request import MOST_TOP

MOST_NAMED = 10_000
"""Sessions that one request may name."""
LONGEST_WAIT = 60.0
"""Seconds for which a request may wait."""
LONGEST_LEASE = 7 * 86400.0

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Wait = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT)]
_UpdateSeconds = Annotated[float, msgspec.Meta(gt=0, le=86400.0)]
_Lease = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE)]


class NewReward(msgspec.Struct, frozen=True):
    """A reward of a session (`Reward`). It replaces the one before as a whole."""

    reward: Number | None
    components: dict[str, Number] = {}
    turns: dict[str, Number] = {}
    sequences: dict[str, Number] = {}

    def at(self, now: float) -> Reward:
        """Return the reward, stored at a Unix time in seconds. Raises `ValueError` if there are too many components."""
        return Reward(self.reward, self.components, self.turns, self.sequences, now)


class Finish(msgspec.Struct, frozen=True):
    """What may be given when a session is finished: a reward (`NewReward`), labels (`LabelChanges`) and an outcome.

    Attributes:
        reward, components, turns, sequences: the reward.
        group, metadata, tags: the labels.
        failed: the kind of failure, a word of the API or of the caller's own; `ok` if nothing failed, whatever the proxy saw.
        detail: what failed, in words.
    """

    reward: Number | UnsetType | None = UNSET
    components: dict[str, Number] = {}
    turns: dict[str, Number] = {}
    sequences: dict[str, Number] = {}
    group: str | UnsetType = UNSET
    metadata: dict[str, Any] | UnsetType = UNSET
    tags: tuple[str, ...] | UnsetType = UNSET
    failed: str | None = None
    detail: str = ""

    @property
    def outcome(self) -> Outcome | None:
        """The outcome; `None` if none is given. Raises `ValueError` if the kind is not a valid word, or missing beside a detail."""
        if self.failed is None and self.detail:
            raise ValueError("`detail` says what failed: it needs `failed`")
        return None if self.failed is None else Outcome(self.failed, self.detail)

    @property
    def new_reward(self) -> NewReward | None:
        """The reward; `None` if no part of one is given."""
        if self.reward is UNSET and not (self.components or self.turns or self.sequences):
            return None
        return NewReward(None if self.reward is UNSET else self.reward, self.components, self.turns, self.sequences)

    @property
    def label_changes(self) -> LabelChanges:
        """The labels. Raises `ValueError` if a bound is exceeded."""
        return LabelChanges(self.group, self.metadata, self.tags)


class Await(msgspec.Struct, frozen=True):
    """Sessions to wait for, for `wait` seconds."""

    sessions: Annotated[list[str], msgspec.Meta(max_length=MOST_NAMED)]
    wait: _Wait = 0.0


class Take(msgspec.Struct, frozen=True):
    """What a consumer takes from the queue.

    Attributes:
        consumer: its name.
        limit: most deliveries to return.
        group_size: sessions of one group in a delivery; 1: one session, whatever its group.
        min_group, group_timeout: once so many seconds have passed since the first of them was finished, a group is delivered with at least
            `min_group` sessions. `None`: it waits until it is whole.
        wait: for how many seconds to wait for a delivery.
        lease: for how many seconds the deliveries belong to the consumer.
        rewarded: only sessions with a reward, and those that were finished as failed, which nobody rewards.
        group, tag, harness: only sessions that have them; `""` stands for any.
        model: only sessions that called it; `""` stands for any. Then `max_lag` concerns its tokens only.
        max_lag: only sessions none of whose sampled tokens lags more than that many policy versions behind the current one. The lag of all
            must be known. `None`: any session.
        holding: deliveries that the consumer has and is still working on. They are not returned again, and their leases are extended.

    Raises:
        ValueError: `min_group` is larger than `group_size`, or one of `min_group` and `group_timeout` is missing.
    """

    consumer: _Name
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    group_size: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    wait: _Wait = 0.0
    lease: _Lease = 600.0
    rewarded: bool = False
    group: str = ""
    tag: str = ""
    harness: str = ""
    model: str = ""
    max_lag: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    holding: Annotated[list[str], msgspec.Meta(max_length=MOST_NAMED)] = []
    min_group: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    group_timeout: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE)] | None = None

    def __post_init__(self) -> None:
        """Check what is said about parts of groups."""
        if (self.min_group is None) is not (self.group_timeout is None):
            raise ValueError("`min_group` and `group_timeout` need each other: how many sessions of a group, and after how many seconds")
        if self.min_group is not None and self.min_group > self.group_size:
            raise ValueError(f"`min_group` {self.min_group} is larger than `group_size` {self.group_size}, the sessions of a whole group")


class ScoreEdited(msgspec.Struct, frozen=True):
    """Which turns of a session to score, and under which edits of the messages before their replies.

    Attributes:
        edits: the edits (`core.context_edits`). Their places are those of each turn's recorded messages.
        turns: the ids of the turns; empty for all.
        score: whether the session's engine scores them. Otherwise only the edited prompts are returned.
        top: number of the likeliest tokens to return at each place.
    """

    edits: Annotated[list[Edit], msgspec.Meta(max_length=MOST_EDITS)]
    turns: Annotated[list[str], msgspec.Meta(max_length=MOST_NAMED)] = []
    score: bool = True
    top: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOP)] = 0


class NewVersion(msgspec.Struct, frozen=True):
    """What a trainer announces about the weights.

    Attributes:
        version: the version, a number or a name. Required with `ready`.
        engines: base URLs of the engines that have it; empty for all.
        phase: `ready`: they have it now. `updating`: they are being replaced, so new calls wait until `ready`.
        owner: who announces it. While an owner is updating, others are refused.
        mode: with `updating`: how you pause the engines yourself, before any weight changes: `abort`, `keep` or `wait` (vLLM's `/pause`).
            So replies that end before `ready` have the version before. Without it, these have the version `mixed`.
        clear_cache: with `mode`: whether that pause empties the prefix cache, and computes frozen requests again.
        timeout: with `updating`: seconds after which the update ends by itself.
    """

    version: int | str = ""
    engines: list[str] = []
    phase: Literal["ready", "updating"] = "ready"
    mode: PauseMode = "none"
    clear_cache: bool = False
    owner: str = ""
    timeout: _UpdateSeconds = 600.0


class NewUpdate(msgspec.Struct, frozen=True):
    """An update of the weights that the proxy carries out.

    Attributes:
        mode: how the engines are paused: vLLM's `abort`, `keep` and `wait`; `none`: not at all.
        clear_cache: whether the pause empties the prefix cache, and computes frozen requests again.
        engines: base URLs of its engines; empty for all.
        owner: who updates the weights. While an owner is updating, others are refused.
        timeout: seconds after which the update ends by itself: the engines are resumed, and the version is unknown.
        id: the id of the update. Without one it gets a random one. A request with the id of the update under way begins no other one.
    """

    mode: PauseMode = "abort"
    clear_cache: bool = True
    engines: list[str] = []
    owner: str = ""
    timeout: _UpdateSeconds = 600.0
    id: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = ""


class FinishedUpdate(msgspec.Struct, frozen=True):
    """The version of the weights that the engines have now, a number or a name."""

    version: int | str


class Deliveries(msgspec.Struct, frozen=True):
    """Deliveries of the queue, by id."""

    deliveries: Annotated[list[str], msgspec.Meta(max_length=MOST_NAMED)]


class Acknowledge(Deliveries, frozen=True):
    """Deliveries that are processed; with `delete` their sessions are deleted."""

    delete: bool = True


class Extend(Deliveries, frozen=True):
    """Deliveries whose lease is to end in `lease` seconds from now."""

    lease: _Lease = 600.0

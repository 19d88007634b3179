"""What a trainer takes home, as typed values.

They are read from the native format (`docs/api.md`). Members that a newer server adds are passed over, so that an older
client goes on working; what a loss needs is always there. Lists are plain Python lists: `torch.tensor(sequence.token_ids)`.
"""

from typing import Any

import msgspec

from tokencache.core.drift import Drift
from tokencache.core.messages import ToolCall
from tokencache.core.turn import Anchor
from tokencache.store.base import Incident, OpenCall
from tokencache.trajectories.rollout import Figures

__all__ = [
    "Anchor",
    "Drift",
    "EngineState",
    "Figures",
    "Incident",
    "OpenCall",
    "Sequence",
    "Served",
    "SessionState",
    "ToolCall",
    "Trajectory",
    "TurnSpan",
]


class Served(msgspec.Struct, frozen=True):
    """The message as the harness was given it."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One model call within a sequence.

    Attributes:
        prompt, completion: half-open ranges of the sequence's tokens. The prompt's is what is new in it; what stands before
            it belongs to the turns before, or to the sequence that this one branched off.
        match, reason, forgiven, anchors: how the prompt came about (`docs/api.md`); `parent` is the turn that it extends, `origin` the
            one that its context was taken from.
        prefix_hash, completion_hash, logprobs_hash: by these `tokencache verify` finds altered ids and log probabilities; the last is empty
            where there are none, or where an older version recorded the turn.
        sampling: the parameters that were sent to the engine; `replaced`: what the harness had asked for instead.
        logprob_kind: `raw` (of the model's own distribution), `processed` (after temperature, top-p and masks), `""`: unknown.
        weight_versions: spans of the completion and the weights that sampled them, as the engine gives them.
        marks: what to know before training on it: `aborted`, `no-logprobs`, `engine-disagrees`, …
        created: seconds since the epoch when the call began; `seconds`: how long it took.
        drift: how a plain rendering of its messages differs; `None` where that was not measured.
    """

    turn: str
    prompt: tuple[int, int]
    completion: tuple[int, int]
    call: str = ""
    match: str = ""
    reason: str = ""
    parent: str | None = None
    origin: str | None = None
    forgiven: list[str] = []
    anchors: list[Anchor] = []
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefix_hash: str = ""
    completion_hash: str = ""
    logprobs_hash: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    model: str = ""
    harness: str = ""
    weight_versions: list[Any] = []
    sampling: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    logprob_kind: str = ""
    experts: str = ""
    dialect: str = ""
    stream: bool = False
    choice: int = 0
    messages: int = 0
    tools: int = 0
    marks: list[str] = []
    created: float = 0.0
    seconds: float = 0.0
    drift: Drift | None = None
    served: Served = Served()


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """A line of turns, each extending the one before, token for token.

    Attributes:
        token_ids, loss_mask, logprobs: one entry per token, all of one length. A token with mask 1 was sampled by the policy in
            this sequence, and its log probability (natural logarithm) is the one that it was sampled with; every other token has
            mask 0 and log probability 0.0.
        start: `root`, `branch`, `resplice` or `plain`: how it begins; `reason` says why.
        parent: the sequence that it branched off, or took its context from.
        root: the sequence where following parents ends; several rollouts in one session have a root each. `""` in older exports.
        continued: a later call went on from one of its turns. `tools`: how many tools its first call offered.
        weight: its share of the rollout's trainable tokens; over a trajectory they add up to 1, or are all 0.
        tokens: how many there are; `trainable_tokens`: how many of them have mask 1.
    """

    id: str
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    turns: list[TurnSpan]
    start: str
    weight: float
    reason: str = ""
    parent: str | None = None
    root: str = ""
    continued: bool = False
    tools: int = 0
    tokens: int = 0
    trainable_tokens: int = 0


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout.

    Attributes:
        complete: nothing that the model said, or may have said, is missing; `incidents` say what is.
        created: seconds since the epoch.
        figures: the rollout in numbers.
    """

    session: str
    complete: bool
    sequences: list[Sequence]
    incidents: list[Incident] = []
    sealed: bool = False
    created: float = 0.0
    figures: Figures


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """A session without its tokens; times in seconds since the epoch.

    Attributes:
        turns: how many are recorded.
        open_calls: calls that began and have not ended.
        complete: no call is open, and no incident left a hole.
    """

    session: str
    turns: int
    sealed: bool
    complete: bool
    open_calls: list[OpenCall]
    incidents: list[Incident] = []
    created: float = 0.0
    used: float = 0.0


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the proxy.

    Attributes:
        url: its base URL, without `/v1`.
        state: `serving`, or `draining`: it takes no new calls.
        serves: it was probed, and sessions go to it; `error` says why not.
        calls: how many are under way on it, on all replicas while it is drained, else on the one that answers.
        drained: it takes no new calls, and none is under way: it may be removed, and stopped.
        models: what the probe found, per model (`docs/engines.md`).
    """

    url: str
    state: str = "serving"
    serves: bool = False
    error: str = ""
    calls: int = 0
    drained: bool = False
    models: list[dict[str, Any]] = []

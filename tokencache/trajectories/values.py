"""Defines typed values for the JSON of the API: trajectories, sequences, turns, session and engine states.

The JSON is the native format (`docs/api.md`). Unknown members are ignored, so an older client reads the JSON of a newer server.
Lists are plain Python lists: `torch.tensor(sequence.token_ids)`.
"""

from typing import Any

import msgspec

from tokencache.core.agents import AgentLabel
from tokencache.core.drift import Drift
from tokencache.core.experts import ExpertPart
from tokencache.core.incidents import Incident
from tokencache.core.media import PlacedMedia
from tokencache.core.messages import ToolCall
from tokencache.core.turn import Anchor, ReplyPiece
from tokencache.core.weights import Announced
from tokencache.store.base import OpenCall
from tokencache.trajectories.placeholders import are_unplaced


class Served(msgspec.Struct, frozen=True):
    """The reply as the harness received it."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a turn, in the form of chat completions. Only exports with text hold it.

    Attributes:
        base: the turn with whose request it shares its first `shared` messages, its tools and its template arguments; `None` if it shares
            none.
        messages: the other messages, as JSON. `None` in place of one that is not valid JSON.
        tools: the tools that were offered. `members`, `kwargs`: the template arguments.
    """

    base: str | None = None
    shared: int = 0
    messages: list[Any] = []
    tools: Any = None
    members: dict[str, Any] = {}
    kwargs: dict[str, Any] = {}


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One model call within a sequence.

    Attributes:
        prompt, completion: half-open ranges of the sequence's tokens. `prompt` covers only the tokens that are new in this prompt. The
            tokens before it belong to earlier turns, or to the sequence from which this one branched off.
        match, reason, forgiven, anchors: how the prompt was built (`docs/api.md`). `parent` is the turn that it extends; `origin` is the
            turn from which it took its context.
        prefix_hash, completion_hash, logprobs_hash: `tokencache verify` uses them to find altered ids and log probabilities.
            `logprobs_hash` is empty if the turn has no log probabilities or an older version recorded it.
        finish_reason: how the reply ended: as its ids prove, otherwise as the engine says (`docs/formats.md`). `engine_reason`: what the
            engine said, if the ids prove something else; otherwise `""`.
        stopped: whether its last id is one at which the model ends a reply. That decides how a reply ended whose reason does not say it.
        begun: number of characters of the served text that the client sent itself, because it continued the reply.
        forced: half-open ranges of the completion that a thinking budget forced, counted from its first token; they have mask 0.
        sampling: the parameters that were sent to the engine. `replaced`: the harness's own values for those that were overridden.
        logprob_kind: `raw` (of the model's own distribution), `processed` (after temperature, top-p and masks), or `""` (unknown).
        weight_versions: spans of the completion with the weight version that sampled each, as the engine reports them.
        version_source: who reported them (`core.weights.VersionSource`); `""` if nothing is known.
        prompt_version: the version that computed the prompt's keys and values; `mixed` if that is not certain, `""` if not known.
        kv: how the prefix cache was kept apart by version: `exact`, `session` or `off`; `""` if no version was known.
        pieces: the parts of a reply that the engine broke off and that was continued; otherwise empty. `again`: why a reply that was broken
            off was not continued.
        experts: the file of its routed experts, below the root of `--experts`; `""` if there is none. `experts_start`: the token of the
            sequence with the file's first row; -1 if that is not known.
        agent: how the harness names the agent that made the call, a label that proves nothing (`core.agents`); `None` if it does not.
        marks: facts to know before training on the turn: `aborted`, `no-logprobs`, `engine-disagrees`, ...
        created: start of the call as Unix time in seconds. `seconds`: its duration.
        drift: how a plain rendering of its messages differs; `None` if that was not measured.
        reward: the reward that the trainer gave to this turn; `None` if it gave none.
        request: what it answers; `None` if the export holds no text, or if the messages are not kept.
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
    engine_reason: str = ""
    stop_reason: int | str | None = None
    stopped: bool = False
    model: str = ""
    harness: str = ""
    agent: AgentLabel | None = None
    weight_versions: list[Any] = []
    version_source: str = ""
    prompt_version: str = ""
    kv: str = ""
    pieces: list[ReplyPiece] = []
    again: str = ""
    forced: list[tuple[int, int]] = []
    begun: int = 0
    sampling: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    logprob_kind: str = ""
    experts: str = ""
    experts_start: int = 0
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
    reward: float | None = None
    request: TurnRequest | None = None


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """A run of turns in which each turn extends the one before it, token for token.

    Attributes:
        token_ids, loss_mask, logprobs: one entry for each token, all of the same length. A token with mask 1 was sampled by the policy
            in this sequence; its entry in `logprobs` is the log probability (natural logarithm) with which it was sampled. Every other
            token has mask 0 and log probability 0.0.
        start: how the sequence begins: `root`, `branch`, `resplice` or `plain`. `reason` is the cause.
        parent: the sequence from which it branched off or took its context.
        root: the first sequence of its chain of parents. Several rollouts in one session have a root each. `""` in older exports.
        continued: whether a later call extended one of its turns. `tools`: the number of tools that its first call offered.
        model: the model that sampled it; each model has sequences of its own. `""` in older exports.
        weight: its share of the rollout's trainable tokens. The weights of a trajectory sum to 1, or are all 0.
        tokens: the number of its tokens. `trainable_tokens`: the number of tokens with mask 1.
        overlong: `cut` (turns at its end were left out) or `masked` (nothing is trained) if it was longer than the requested limit.
        reward: the reward that the trainer gave to this sequence; `None` if it gave none.
        experts: the files with the routed experts of its tokens, in order; `batching.load_experts` joins them. Empty if none are stored.
        media: the images and other media in its tokens, in order (`docs/images.md`).
        versions: number of trainable tokens of each policy version. `mixed_tokens`: trainable tokens that one of several versions sampled.
            Trainable tokens in neither have no known version.
        oldest_version, newest_version: of `versions`; `""` if there are none, or if their order is not known.
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
    model: str = ""
    tokens: int = 0
    trainable_tokens: int = 0
    overlong: str = ""
    reward: float | None = None
    experts: list[ExpertPart] = []
    media: list[PlacedMedia] = []
    versions: dict[str, int] = {}
    mixed_tokens: int = 0
    oldest_version: str = ""
    newest_version: str = ""

    @property
    def has_unplaced_media(self) -> bool:
        """Whether it has images or other media, and it is not known which of its tokens stand for which of them."""
        return are_unplaced(self.media, (turn.marks for turn in self.turns))


class DriftFigures(msgspec.Struct, frozen=True):
    """The drift of a rollout that splicing avoided, as far as it was measured.

    Attributes:
        measured: turns whose spliced prompt was compared with a plain rendering of its messages. `drifted`: those that differ.
        tokens: tokens of these prompts that a plain rendering would not have had.
        causes: number of sites for each cause.
        unmeasured: number of turns that could not be measured, by reason.
        text_only_sequences: number of sequences that the rollout would have had if every prompt had been rendered plainly.
        trainable_tokens_lost: trainable tokens after the first break of each sequence. A trainer that keeps only one contiguous piece of
            each sequence would lose them. Both are `None` if some turn was not measured.
    """

    measured: int
    drifted: int
    tokens: int
    causes: dict[str, int]
    unmeasured: dict[str, int] = {}
    text_only_sequences: int | None = None
    trainable_tokens_lost: int | None = None


class OverlongFigures(msgspec.Struct, frozen=True):
    """What the requested limits of length (`max_length` and others) did to a rollout.

    Attributes:
        policy: what happens to a sequence that is too long: `drop`, `cut` or `mask`. `limits`: the limits in tokens, by name.
        dropped: sequences that were left out. `cut`: sequences without their last turns. `masked`: sequences of which nothing is trained.
        trainable_tokens_lost: trainable tokens that were left out or masked.
        turns: ids of the turns that were left out.
    """

    policy: str
    limits: dict[str, int]
    dropped: int = 0
    cut: int = 0
    masked: int = 0
    trainable_tokens_lost: int = 0
    turns: list[str] = []


class StaleFigures(msgspec.Struct, frozen=True):
    """What the requested limit of lag (`max_lag`) did to a rollout.

    Attributes:
        max_lag: how many versions tokens may lag behind `current`, the current policy version; that is `""` if it is not known.
        dropped: sequences that were left out because they lag more. `unknown`: those that were left out because their lag is not known.
        trainable_tokens_lost: trainable tokens that were left out.
        turns: ids of the turns that were left out.
    """

    max_lag: int
    current: str
    dropped: int = 0
    unknown: int = 0
    trainable_tokens_lost: int = 0
    turns: list[str] = []


class PlaceholderFigures(msgspec.Struct, frozen=True):
    """What the formats of trainers do not train, because of tokens that stand for parts of images (`docs/images.md`).

    Attributes:
        dropped: sequences that were left out, because the model sampled such tokens. `turns`: ids of their turns.
        masked: sequences of which nothing is trained, because the engine did not report which tokens stand for their images.
        trainable_tokens_lost: the trainable tokens of all these.
    """

    dropped: int
    trainable_tokens_lost: int
    turns: list[str] = []
    masked: int = 0


class ModelFigures(msgspec.Struct, frozen=True):
    """Which sequences were left out because of the model that sampled them.

    Attributes:
        selected: the requested model (`model`); `""` if none was requested: then a format for trainers has those that are trained.
        dropped: number of sequences that were left out, of each model.
        trainable_tokens_lost: trainable tokens that were left out.
        turns: ids of the turns that were left out.
    """

    selected: str
    dropped: dict[str, int]
    trainable_tokens_lost: int = 0
    turns: list[str] = []


class Figures(msgspec.Struct, frozen=True):
    """Counts over a rollout.

    Attributes:
        calls: model calls that produced a turn. `turns` is larger if a call had several choices.
        trainable_tokens: tokens with mask 1. `masked_tokens`: all other tokens of the sequences.
        untrainable_tokens: masked tokens that were sampled, but were forced, have no log probabilities, or are in a sequence that was
            masked as a whole.
        matches, forgiven, incidents: number of turns for each kind of match and each applied rule; number of incidents of each kind.
        versions: number of trainable tokens of each policy version. `mixed_tokens`: trainable tokens that one of several versions sampled.
            Trainable tokens in neither have no known version.
        oldest_version, newest_version: of `versions`; `""` if there are none, or if their order is not known.
        version_order: `versions` from the oldest to the newest; empty if their order is not known, and in older exports.
        drift: `None` if nothing was measured.
        overlong: `None` if no limit of length was requested. With one, all other figures but `drift` are of what remains.
        stale: the same for a limit of lag.
        placeholders: the same for sequences with placeholders of images that a trainer cannot use; `None` if there are none, and in the
            native format, which has them.
        models: the same for sequences of other models; `None` if there are none, and in the native format unless a model was requested.
    """

    calls: int
    turns: int
    sequences: int
    trainable_tokens: int
    masked_tokens: int
    untrainable_tokens: int
    matches: dict[str, int]
    forgiven: dict[str, int]
    incidents: dict[str, int]
    versions: dict[str, int] = {}
    mixed_tokens: int = 0
    oldest_version: str = ""
    newest_version: str = ""
    version_order: list[str] = []
    drift: DriftFigures | None = None
    overlong: OverlongFigures | None = None
    stale: StaleFigures | None = None
    placeholders: PlaceholderFigures | None = None
    models: ModelFigures | None = None


class EngineWeightsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the weights of one engine.

    Attributes:
        url: its base URL.
        version: the version; `""` if it is not known.
        phase: `ready`, `updating` or `unknown`.
        source: who reports the version: `trainer`, or `engine` (its own `/weight_info`); `""` if it is not known.
        hint: what to do if it is not known.
    """

    url: str
    version: str
    phase: str
    source: str = ""
    hint: str = ""


class WeightsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What trainers announced about the weights of the engines.

    Attributes:
        version: the version that was announced last; `""` if none was, or if an update ended without one.
        phase: `updating` while an update is under way, otherwise `ready`, or `unknown` if no version is known.
        update: the number of changes so far. `id`: the id of the update under way; `""` if there is none.
        engines: what holds for each engine.
        owner, until: who is updating the weights, and when that update ends by itself (Unix time in seconds); `""` and `None` if nobody is.
        history: the versions that were announced, at most 100, the newest last.
    """

    version: str
    phase: str
    update: int
    engines: list[EngineWeightsInfo]
    id: str = ""
    owner: str = ""
    until: float | None = None
    history: list[Announced] = []


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that returned as text in the request of another call.

    Attributes:
        kind: `compaction` if a new context begins with the text: the summary of an earlier one. `delegation` if the text was added to a
            running conversation, as a tool result or a message: the answer of a sub-agent.
        sources: the turns that sampled the text. If there are several, each sampled the same text, and which one returned is unknown.
        turn: the turn whose request was the first to contain it. `message`: index of the message in that request.
        evidence: `equal` if it is the whole text of the message, `contained` if it is a part. White space does not count.
    """

    kind: str
    sources: list[str]
    turn: str
    message: int
    evidence: str


class TurnChange(msgspec.Struct, frozen=True, kw_only=True):
    """What changed in the request of a turn, compared with the turn that it could have continued (`trajectories.changes`).

    Attributes:
        turn: the turn. `number`: its place in the order of recording, from 0.
        against: the number of the other turn; `None` if it was compared with none.
        message: index of the first message that differs; `None` if none does.
        text: what changed, in words: `message 0, system, differs: 13:40:01 → 13:41:07`. It has texts of the harness.
        lost: texts that the model sampled and a parser of the engine dropped, so that the harness never saw them (`core.lost_text`).
        not_compared: why that is not known; `""` if it is.
    """

    turn: str
    number: int
    against: int | None = None
    message: int | None = None
    text: str = ""
    lost: list[str] = []
    not_compared: str = ""

    def __str__(self) -> str:
        """Write it with the turn that it was compared with; `""` if there is nothing to say."""
        return self.text if self.against is None else f"compared with turn {self.against}: {self.text}"


class ScoredTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn under edits of the messages before its reply (`core.context_edits`): m sampled ids after an edited prompt of p ids.

    Attributes:
        turn: the turn.
        sequence: the sequence that it belongs to.
        edits: the indexes of the edits that changed its prompt; empty if none has a place in it: then the prompt is the recorded one.
        prompt_token_ids: the p ids of the edited prompt; empty if the turn is refused.
        token_ids: the m ids that were sampled.
        loss_mask: m values: 1 where the policy chose the id and its log probability is recorded, otherwise 0, as for a model that is not
            trained.
        logprobs: m recorded log probabilities, natural logarithms; 0.0 where `loss_mask` is 0.
        score: m log probabilities of the same ids after the edited prompt, of the model's own distribution; empty without a score.
        top_ids: m lists of the `top` likeliest ids at each place, the likeliest first; empty without `top`.
        top_logprobs: their log probabilities.
        refused: why it has no score, one of the names below; `""` if it is not refused.
        error: the same in words.
    """

    turn: str
    sequence: str
    edits: list[int] = []
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    score: list[float] = []
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    refused: str = ""
    error: str = ""


class EditedScores(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of a session under edits, in the order in which they were recorded.

    `version` is the engine's own label of the weights that scored (`/weight_info`); `""` if it has none, nothing was scored, or engines of
    several models scored under different labels.
    """

    session: str
    version: str = ""
    turns: list[ScoredTurn] = []


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """All sequences of one session.

    Attributes:
        complete: false if something that the model sampled, or may have sampled, is missing. `incidents` describe it.
        outcome: `ok`, or the kind of failure with which it ended (`core.outcome`). `outcome_detail`: the same in words.
        valid: whether it is complete and its outcome is `ok`. The reward of an invalid rollout says nothing about the policy. An older
            export has no outcome: its rollout is valid if it is complete.
        created: when the session began, as Unix time in seconds.
        figures: counts over the rollout.
        state: `open` (it accepts calls), `finished` (it accepts none) or `sealed` (its record does not change any more); `""` in older
            exports.
        reward: the reward of the whole rollout; `None` if none was given. `reward_components`: its named parts.
        group: the name that the rollouts of one prompt share (GRPO); `""` if there is none.
        metadata, tags: what the trainer stored with the session.
        links: answers that returned as text in other calls.
        digest: hash over all of this (`trajectories.digest`); `""` in older exports.
    """

    session: str
    complete: bool
    sequences: list[Sequence]
    incidents: list[Incident] = []
    sealed: bool = False
    created: float = 0.0
    figures: Figures
    state: str = ""
    reward: float | None = None
    reward_components: dict[str, float] = {}
    group: str = ""
    metadata: dict[str, Any] = {}
    tags: list[str] = []
    links: list[Link] = []
    digest: str = ""
    outcome: str = "ok"
    outcome_detail: str = ""
    valid: bool = True

    def __post_init__(self) -> None:
        """Set `valid` where an older export has none."""
        _derive_valid(self)


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """A session without its tokens. Times are Unix time in seconds.

    Attributes:
        turns: number of recorded turns.
        open_calls: calls that have begun and not ended.
        complete: whether no call is open and no incident reports missing data.
        state: `open`, `finished` or `sealed` (`Trajectory`). `finished`: when its owner finished it; `None` if it is open.
        harness, model: those of its settings, otherwise those of its last turn; `""` if unknown.
        tokens: number of sampled tokens in its turns.
        reward, reward_components, group, metadata, tags: as in `Trajectory`.
        outcome, outcome_detail, valid: the same. Of an open session it is what is known so far.
    """

    session: str
    turns: int
    sealed: bool
    complete: bool
    open_calls: list[OpenCall]
    incidents: list[Incident] = []
    created: float = 0.0
    used: float = 0.0
    state: str = ""
    finished: float | None = None
    harness: str = ""
    model: str = ""
    tokens: int = 0
    reward: float | None = None
    reward_components: dict[str, float] = {}
    group: str = ""
    metadata: dict[str, Any] = {}
    tags: list[str] = []
    outcome: str = "ok"
    outcome_detail: str = ""
    valid: bool = True

    def __post_init__(self) -> None:
        """Set `valid` where an older proxy sends none."""
        _derive_valid(self)


def _derive_valid(read: Trajectory | SessionState) -> None:
    """Set `valid` from the members that an older version writes, too. A value that says less stays, so that `verify` finds it."""
    msgspec.structs.force_setattr(read, "valid", read.valid and read.complete and read.outcome == "ok")


class PastReward(msgspec.Struct, frozen=True, kw_only=True):
    """A reward of a session, as it was stored.

    Attributes:
        reward: of the whole rollout; `None` if it has none. `components`: its named parts.
        turns, sequences: rewards of single turns and sequences, by id.
        at: when it was stored, as Unix time in seconds; 0 if none was stored.
        recorded: with rewards of sequences, how many turns were recorded then; otherwise 0.
    """

    reward: float | None = None
    components: dict[str, float] = {}
    turns: dict[str, float] = {}
    sequences: dict[str, float] = {}
    at: float = 0.0
    recorded: int = 0


class RewardState(PastReward, frozen=True, kw_only=True):
    """The reward of a session, and those before it.

    Attributes:
        session: the session.
        history: the rewards that it replaced, the newest last; at most 99.
        count: how many rewards were stored, this one included.
    """

    session: str
    history: list[PastReward] = []
    count: int = 0


class DeliveryState(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that a consumer took from the queue.

    Attributes:
        id: the name of the delivery in the queue.
        group: the group of its sessions; `""` if they have none.
        attempt: 1 at the first time; more if a consumer took the sessions before and did not acknowledge them.
        until: when the lease ends, as Unix time in seconds.
        sessions: the states of its sessions, sealed.
        missing: how many sessions fewer it has than the consumer asked for: the group had waited for `group_timeout`.
        valid: those of its sessions that are valid (docs/lifecycle.md).
    """

    id: str
    group: str
    attempt: int
    until: float
    sessions: list[SessionState]
    missing: int = 0
    valid: list[str] = []


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """A group of sessions that are in the queue and that nobody has taken.

    Attributes:
        group: its name; `""` for sessions without a group.
        size: how many sessions of it a consumer asked for last; 0 if none did.
        ready: how many of its sessions are finished and have no call in flight.
        short: whether that is no multiple of `size`, so that sessions wait for others; true if the size is not known.
        waits_for: its sessions that have calls in flight, and if it is short those that are not finished.
        unrewarded: those ready ones that a consumer does not take because they have no reward.
        waited: seconds since the first of those in the queue was finished.
    """

    group: str
    size: int
    ready: int
    short: bool
    waits_for: list[str] = []
    unrewarded: list[str] = []
    waited: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether sessions of it wait for others, or for a reward."""
        return self.short or bool(self.unrewarded)

    def __str__(self) -> str:
        """Describe it in words: `group g3: 3 of 4 ready, waits for r17 since 412 s`."""
        text = f"{f'group {self.group}' if self.group else 'no group'}: {self.ready}{f' of {self.size}' if self.size else ''} ready"
        if not self.group and self.size > 1:
            return f"{text}, and consumers take groups only"
        if self.waits_for:
            text += f", waits for {named(self.waits_for)} since {self.waited:.0f} s"
        elif self.short and self.size:
            text += f", waits since {self.waited:.0f} s, and no other session of it is open"
        return text + (f", without a reward: {named(self.unrewarded)}" if self.unrewarded else "")


def named(names: list[str], most: int = 8) -> str:
    """Return names in words, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of finished sessions.

    Attributes:
        candidates: sessions that are finished and not taken. `ready`: those of them without a call in flight. `invalid`: those of them
            that are not valid.
        taken: sessions that a consumer took and has not acknowledged. `consumers`: the same for each consumer.
        groups: the groups of those that are not taken, in the order in which they were finished.
    """

    candidates: int
    ready: int
    taken: int
    consumers: dict[str, int]
    invalid: int = 0
    groups: list[GroupState] = []


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions under which a proxy records now.

    Attributes:
        version, python: of tokencache, and of its Python.
        settings: those that differ from their defaults, without keys and passwords.
        settings_digest: SHA-256 of all settings on which records may depend. Keys, addresses, places and logging are left out.
        adapters: SHA-256 of the adapter of each harness.
        engines: each with `url`, `serves`, `error`, `weight_label` and `models`: what the probe found for each model (`docs/engines.md`),
            and its `rendering`: a hash of the token ids of a sample conversation, which differs between templates and between tokenizers;
            `""` if it cannot be rendered.
    """

    version: str
    python: str
    settings: dict[str, Any]
    settings_digest: str
    adapters: dict[str, str]
    engines: list[dict[str, Any]]


class EngineCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens an engine can hold, and holds, for sessions.

    Attributes:
        url: its base URL.
        serves: as in `EngineState`.
        tokens: the size of its KV cache; `None` if that is not known. `error` is the reason.
        ranks: the same of each data-parallel rank.
        live_tokens: the tokens of calls in flight, and of sessions that paused less than three seconds ago.
    """

    url: str
    serves: bool
    tokens: int | None = None
    ranks: dict[str, int] = {}
    error: str = ""
    live_tokens: int = 0


class WaitingSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that waits to be created at the replica that answers: since when (Unix time in seconds), and its place, from 1."""

    session: str
    since: float
    place: int


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """How many sessions the KV caches of the engines hold.

    Attributes:
        tokens: the size of the caches of all engines that serve; 0 if none is known.
        live_tokens: the tokens that sessions hold there now.
        footprint: the mean number of tokens with which the last 64 sessions ended; 0 if none has ended. `ended`: how many count.
        sessions_fit: how many sessions of that footprint fit into nine tenths of the caches; `None` if that is not known.
        engines: the same for each engine.
        waiting: the sessions that wait to be created (`--admission`).
    """

    tokens: int
    live_tokens: int
    footprint: int
    ended: int
    sessions_fit: int | None
    engines: list[EngineCapacity]
    waiting: list[WaitingSession] = []


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the proxy.

    Attributes:
        url: its base URL, without `/v1`.
        state: `serving`, or `draining`: it accepts no new calls.
        serves: whether it was probed and sessions are routed to it. Otherwise `error` is the reason.
        calls: its calls in progress: those of all replicas while it is draining, otherwise those of the replica that responds.
        drained: whether it accepts no new calls and has none in progress, so that it may be removed and stopped.
        group: the model of its group, whose engines continue each other's sessions; `""` if it was not probed yet.
        names: the names under which it serves the model and its adapters.
        trainable: whether one of them is trained (`--not-trainable`).
        note: says so if it is the only engine of its group, beside others.
        models: what the probe found, for each model (`docs/engines.md`).
    """

    url: str
    state: str = "serving"
    serves: bool = False
    error: str = ""
    calls: int = 0
    drained: bool = False
    group: str = ""
    names: list[str] = []
    trainable: bool = True
    note: str = ""
    models: list[dict[str, Any]] = []

"""Defines a turn, the record of one model call, and rebuilds token ids from stored turns.

A turn is written once and never changes. Its tokens are stored as a *delta*: a prompt is the first `shared` tokens of another turn's
prefix (`base`), followed by the turn's own tokens. So a session of n turns with one growing history stores its tokens once, not n times.
"""

from typing import Any, Literal

import msgspec
import xxhash

from tokencache.core import ids
from tokencache.core.agents import AgentLabel
from tokencache.core.media import PlacedMedia
from tokencache.core.messages import Message
from tokencache.core.reasons import Described

MatchKind = Literal["root", "continue", "branch", "resplice", "plain"]


class TurnMark(Described):
    """A property of a turn that a trainer must know."""

    ABORTED = "aborted", "the harness disconnected during the reply"
    ENGINE_ABORTED = "engine-aborted", "the engine ended the reply by itself"
    UPSTREAM_BROKE = "upstream-broke", "the engine closed the connection during the reply"
    ENGINE_ERROR = "engine-error", "the engine reported an error within the reply"
    ENGINE_DISAGREES = "engine-disagrees", "the engine used other prompt ids than were sent; no turn continues this one"
    INTERNAL_ERROR = "internal-error", "tokencache failed to pass the reply on"
    NO_LOGPROBS = "no-logprobs", "the engine returned no log probabilities, or values that are none"
    RAW_LOGPROBS = (
        "raw-logprobs",
        (
            "the log probabilities are the model's own, and the request changed the distribution that the reply was sampled from, by a "
            "temperature or a cut-off for example ([sampling](sampling.md#log-probabilities-raw-or-processed))"
        ),
    )
    UNCERTAIN = (
        "uncertain",
        "not all ids of the reply are certain; only those that are certain are recorded, and no turn continues this one",
    )
    FORCED = "forced", "the thinking budget put ids in the place of the policy's choice: `forced` lists them, and they have mask 0"
    BUDGET_UNPROVEN = (
        "budget-unproven",
        "the request had a thinking budget, and it is not known which ids it put in the place of the policy's choice; they have mask 1",
    )
    LATE_GRAMMAR = (
        "late-grammar",
        (
            "the request hides its reasoning, so a grammar binds the reply to a direct call from the first token; this one was bound only "
            "after its thought, because the engine returns no ids otherwise ([sampling](sampling.md#where-a-grammar-starts))"
        ),
    )
    MEDIA = "media", "the request contains images or other media"
    MEDIA_NOT_KEPT = (
        "media-not-kept",
        "the bytes of an image of the request are not stored: the limit (`--max-media-bytes`) is reached, or the store failed",
    )
    SAMPLED_PLACEHOLDER = (
        "sampled-placeholder",
        "the model sampled a token that stands for an image, here or in a turn that a limit left out; no format for trainers has it",
    )
    SHARED = (
        "shared",
        (
            "the turn belongs to the session from which this one was forked, which trains it; here its tokens have no log probabilities, "
            "and mask 0"
        ),
    )
    NOT_IN_HISTORY = (
        "not-in-history",
        "a fork has it only because a turn that it shares is stored as what it adds to this one; no call of the fork continues it",
    )
    NOT_TRAINABLE = (
        "not-trainable",
        (
            "its model is not trained (`--not-trainable`): its tokens have mask 0, and a format for trainers has them only if you select "
            "the model"
        ),
    )
    LOST_TEXT = (
        "lost-text",
        (
            "a parser of the engine dropped text that the model sampled. It is found when somebody looks (`tokencache show`, the viewer, "
            "`session.changes()`), and not stored ([lost to the parser](export.md#lost-to-the-parser))"
        ),
    )
    SECOND_SAMPLE = "second-sample", "the same call had been made and answered before"
    UNANSWERED = "unanswered", "the harness disconnected before the reply was complete"
    NEVER_ANSWERED = "never-answered", "it is `unanswered`, and so was each equal call before it"
    CONTINUED = "continued", "the engine broke the reply off, and it was continued from its last token; `pieces` lists its parts"
    MIXED_WEIGHTS = "mixed-weights", "the weights changed, or may have changed, during the reply, and which token has which is not certain"
    HYBRID_KV = "hybrid-kv", "the prompt was computed with older weights than those that sampled the reply, as `--kv session` permits"
    STALE_KV = "stale-kv", "the weights changed during the reply, and the engine kept, or may have kept, keys and values of the older ones"


BROKEN_OFF = frozenset({
    TurnMark.ABORTED,
    TurnMark.ENGINE_ABORTED,
    TurnMark.UPSTREAM_BROKE,
    TurnMark.ENGINE_ERROR,
    TurnMark.INTERNAL_ERROR,
})  # fmt: skip
"""Marks of turns whose reply did not end by itself, or that could not be passed on as a whole."""
UNRECEIVED = BROKEN_OFF | {TurnMark.UNCERTAIN, TurnMark.UNANSWERED}
"""The same, and those of turns whose ids are not certain or whose client left: perhaps nobody received the reply as it is recorded."""
UNTRAINED = frozenset({TurnMark.NO_LOGPROBS, TurnMark.SHARED, TurnMark.NOT_TRAINABLE})
"""Marks of turns whose tokens are not trained: they have no log probabilities, or are not the policy's."""


class Anchor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A recognized reply that keeps its exact ids inside a respliced prompt: its turn, and its half-open range of tokens.

    `place` is the index of its message in the request; -1 in records of versions before 0.2, which did not store it. `offset` is the
    number of tokens of the reply before the range: its thinking, where the template shows the rest only (`history: follow`).
    """

    turn: str
    start: int
    end: int
    place: int = -1
    offset: int = 0


class ReplyPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a reply that one request to an engine sampled.

    Attributes:
        call: the id of the request (`X-Request-Id`).
        engine: base URL of the engine.
        start, end: half-open range of the completion's tokens.
        ended: how it ended: `abort` (the engine ended it), `error` (an error in its stream), `lost` (the connection), or the finish reason.
    """

    call: str
    engine: str
    start: int
    end: int
    ended: str = ""


class Turn(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, rename={"applied_rules": "forgiven", "position_key": "place"}):
    """One recorded model call, without its tokens.

    Attributes:
        id: unique within the session.
        call: the id of the HTTP call; the choices of one call with n > 1 have the same.
        match: how the history relates to recorded turns (`core.match`); `reason` is a `reasons.Reason` or `""`.
        parent: the turn whose prefix this prompt starts with, token for token (`continue` and `branch` only).
        origin: the turn from which the context was taken, if that is not the parent (`resplice`): its reply is the last one in the prompt.
        applied_rules: names of the rules that were needed to recognize the replies in its history; stored as `forgiven`.
        anchors: the recognized replies inside a respliced prompt.
        base, shared: for token storage: the prompt's first `shared` tokens are those of `base`'s prefix.
        prompt_tokens, completion_tokens: lengths, in tokens.
        prefix_hash, completion_hash: xxh3-128 of the packed ids (16 bytes); turns with equal hashes are interchangeable.
        logprobs_hash: xxh3-128 of the packed log probabilities (`Tokens.logprobs`); empty if there are none.
        served: the message as the harness received it; of a reply that the client continued, with the beginning that the client sent.
        adapter_of: the base model, if its model is a LoRA adapter; `""` if it is none, and in turns of older versions.
        begun: the number of characters of its text that the client sent with the request, because it continued the reply (`continued`).
        position_key: the chain of the conversation that it answers (16 bytes); stored as `place`.
        judged, foreign, before: hashes of the history that it answers (`evidence`).
        handle: the handle that was issued with it; `""` if none.
        cuts: where the harness may have disconnected in an aborted turn, or where its calls begin, packed (`verdict.pack_cuts`).
        finish_reason: how the reply ended: as its ids prove, otherwise as the engine says (`proxy.recorder`). `engine_reason` is what the
            engine said, if the ids prove something else; otherwise `""`.
        stopped: whether the completion ends with a stop id, which is the template's end of turn or the next opener.
        forced: half-open ranges of the completion that the policy did not choose, because a thinking budget forced them (`core.forced`).
            They have mask 0, and their log probabilities are recorded as 0.0.
        sampling: the sampling parameters that were sent to the engine.
        replaced: sampling parameters that the session's policy replaced: name → the value that the harness requested, `None` if it
            requested none.
        logprob_kind: `raw` if the log probabilities are those of the model's own distribution, `processed` if they are those of the
            distribution after temperature, top-p and masks, `""` if that is unknown.
        experts: the path of the file of routed experts; `""` if there is none.
        experts_start: the number of the prompt's tokens whose experts are in the files of other turns (`base`, and its bases); its own file
            begins there. -1 if the rows of its file could not be placed (`core.experts`).
        harness: the adapter whose rules applied; `""` if none.
        agent: how the harness names the agent that made the call; `None` if it does not. A label that proves nothing (`core.agents`).
        context_base, context_shared: for message storage: the first `context_shared` messages of its request are those of
            `context_base`'s request.
        marks: properties that a trainer must know (`TurnMark`).
        created: when the call began, Unix time in seconds; `seconds` is how long it took.
        versions: spans of the completion with the policy version that sampled each: `{"version", "start", "end"}` (`core.weights`).
        version_source: who reported them (`weights.VersionSource`); `""` if nothing is known.
        prompt_version: the policy version that computed the prompt's keys and values; `mixed` if that is not certain, `""` if not known.
        kv: how the prefix cache was kept apart by version: `exact`, `session` or `off`; `""` if no version was known.
        pieces: the parts of a reply that was continued; empty for any other.
        again: why a reply that the engine broke off was not continued; `""` if it was, or if none was broken off.
        media: the images and other media of its prompt, in order, whether its tokens are stored with it or with `base`: prompts may have
            the same ids and other images. Also empty if their places are not known.
    """

    id: str
    call: str
    match: MatchKind
    reason: str = ""
    parent: str | None = None
    origin: str | None = None
    applied_rules: tuple[str, ...] = ()
    anchors: tuple[Anchor, ...] = ()
    base: str | None = None
    shared: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefix_hash: bytes = b""
    completion_hash: bytes = b""
    logprobs_hash: bytes = b""
    served: Message = Message("assistant")
    begun: int = 0
    position_key: bytes = b""
    judged: bytes = b""
    foreign: bytes = b""
    before: bytes = b""
    handle: str = ""
    cuts: bytes = b""
    finish_reason: str | None = None
    engine_reason: str = ""
    stop_reason: int | str | None = None
    stopped: bool = False
    model: str = ""
    adapter_of: str = ""
    dialect: str = ""
    stream: bool = False
    choice: int = 0
    messages: int = 0
    tools: int = 0
    forced: tuple[tuple[int, int], ...] = ()
    sampling: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    logprob_kind: Literal["raw", "processed", ""] = ""
    experts: str = ""
    experts_start: int = 0
    harness: str = ""
    agent: AgentLabel | None = None
    context_base: str | None = None
    context_shared: int = 0
    marks: tuple[str, ...] = ()
    created: float = 0.0
    seconds: float = 0.0
    versions: list[Any] = []
    version_source: str = ""
    prompt_version: str = ""
    kv: Literal["exact", "session", "off", ""] = ""
    pieces: tuple[ReplyPiece, ...] = ()
    again: str = ""
    media: tuple[PlacedMedia, ...] = ()

    @property
    def served_text(self) -> str:
        """The text that was served in this call, as it was sent."""
        return (self.served.content or "")[self.begun :]

    @property
    def chosen_tokens(self) -> int:
        """The number of tokens of its completion that the policy chose; none if its model is not trained."""
        if TurnMark.NOT_TRAINABLE in self.marks:
            return 0
        return self.completion_tokens - sum(end - start for start, end in self.forced)

    def chosen_mask(self) -> list[int]:
        """Return 1 for each token of its completion that the policy chose, and 0 for each that was forced."""
        mask = [1] * self.completion_tokens
        for start, end in self.forced:
            mask[start:end] = [0] * (end - start)
        return mask


class Tokens(msgspec.Struct, frozen=True):
    """The tokens of one turn: packed ids of its prompt after the first `shared` and of its completion, and packed log probabilities."""

    delta: bytes
    completion: bytes
    logprobs: bytes = b""


class Prefix(msgspec.Struct, frozen=True):
    """The exact ids of a history: a turn's prompt and completion, packed.

    `completion` is the number of tokens at the end that the turn itself sampled.
    """

    ids: bytes
    completion: int

    @property
    def prompt(self) -> bytes:
        """The packed prompt ids."""
        return self.ids[: len(self.ids) - self.completion * ids.ID_BYTES]


def hash_ids(packed: bytes) -> bytes:
    """Hash packed ids: xxh3-128, 16 bytes."""
    return xxhash.xxh3_128_digest(packed)


def hash_logprobs(packed: bytes) -> bytes:
    """Hash packed log probabilities: xxh3-128, 16 bytes; no bytes if there are none."""
    return xxhash.xxh3_128_digest(packed) if packed else b""


def extend_prefix(packed: bytearray, record: Turn, tokens: Tokens) -> None:
    """Extend the packed prefix of a turn's base to the turn's own, in place.

    Raises:
        ValueError: the records are torn: prompt or completion do not have the recorded length.
    """
    del packed[record.shared * ids.ID_BYTES :]
    packed += tokens.delta
    prompt, completion = len(packed) // ids.ID_BYTES, ids.count(tokens.completion)
    if prompt != record.prompt_tokens:
        raise ValueError(f"turn {record.id}: {prompt} prompt tokens rebuilt, {record.prompt_tokens} recorded")
    if completion != record.completion_tokens:
        raise ValueError(f"turn {record.id}: {completion} completion tokens stored, {record.completion_tokens} recorded")
    packed += tokens.completion


def rebuild_prefix(lookup: "dict[str, tuple[Turn, Tokens]]", turn: str) -> Prefix:
    """Rebuild a turn's prefix from deltas; `lookup` contains the turn and all its bases.

    Raises:
        KeyError: a base is missing.
        ValueError: the records are torn: a prompt or completion does not have the recorded length.
    """
    line = []
    at: str | None = turn
    while at is not None:
        line.append(lookup[at])
        at = line[-1][0].base
    packed = bytearray()  # extended in place, so that the tokens are copied once
    for record, tokens in reversed(line):
        extend_prefix(packed, record, tokens)
    return Prefix(bytes(packed), ids.count(line[0][1].completion))

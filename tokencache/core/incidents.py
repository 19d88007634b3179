"""Lists the kinds of incidents: everything except its turns that a trainer must know about a session.

A kind may be a *hole*: the record lacks something that the model generated, or may have generated. A session with a hole is not complete.
What is recorded is exact in any case. To add a kind, add a member to `IncidentKind`. Tests compare the pages of `docs/` and the viewer
with this table.
"""

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Self

import msgspec


class Incident(msgspec.Struct, frozen=True, omit_defaults=True):
    """An incident of a session, as it is stored and exported.

    Attributes:
        kind: an `IncidentKind`; a newer version may have written another one.
        detail: what happened, in words.
        hole: whether the record lacks something that the model generated, or may have generated.
        call, turn: the ids of the call and the turn; `""` if it concerns none.
        at: Unix time in seconds.
        status: the HTTP status with which the engine answered, or with which the proxy refused the call; 0 if there is none, or if an
            older version recorded the incident.
        since: of `retry-joined`, when the repeated call arrived, as Unix time in seconds; 0 if an older version recorded the incident.
    """

    kind: str
    detail: str = ""
    hole: bool = False
    call: str = ""
    turn: str = ""
    at: float = 0.0
    status: int = 0
    since: float = 0.0


class IncidentKind(StrEnum):
    """A kind of incident: its name, what is missing if it is a hole (otherwise `""`), what happened, and what to do."""

    missing: str
    meaning: str
    action: str

    def __new__(cls, name: str, missing: str, meaning: str, action: str) -> Self:
        """Create a member; its value is its name."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.missing, member.meaning, member.action = missing, meaning, action
        return member

    @property
    def hole(self) -> bool:
        """Whether an incident of this kind is a hole."""
        return bool(self.missing)

    def incident(self, detail: str, *, at: float, call: str = "", turn: str = "", hole: bool | None = None, status: int = 0) -> Incident:
        """Make an incident of this kind; `at` is Unix time in seconds, `hole` overrides the kind's own value."""
        return Incident(str(self), detail, self.hole if hole is None else hole, call, turn, at, status)

    # Holes.
    STORE_ERROR = (
        "store-error",
        "the turn of this call",
        "the store could not save the turn",
        "Repair Redis. The turn is lost; the calls after it started a new sequence.",
    )
    SESSION_LOST = (
        "session-lost",
        "turns before this call",
        "the store lost the session, or turns of it, for example because Redis restarted empty or a replica took over that was behind",
        "Run Redis with `appendonly yes` and `appendfsync always` on a disk that persists.",
    )
    CALL_OPEN = (
        "call-open",
        "the turn of this call",
        "a call has started and not ended: it is in progress, or its proxy died",
        "Fetch the session again later. If the incident stays, the turn is lost.",
    )
    UPSTREAM_BROKE = (
        "upstream-broke",
        "the rest of the reply",
        "the engine closed the connection during a reply",
        "Check the log and the memory of the engine, and any gateway in front of it.",
    )
    ENGINE_ERROR = (
        "engine-error",
        "the rest of the reply",
        "the engine reported an error within its reply",
        "Check the log of the engine.",
    )
    NO_TOKEN_IDS = (
        "no-token-ids",
        "the token ids of the reply",
        "the engine did not return the token ids that it used",
        "Check for a router that drops `return_token_ids` ([router](topologies/machines.md#vllm-router)), or an engine that changed.",
    )
    NOTHING_RECEIVED = (
        "nothing-received",
        "the reply",
        "the call ended before the engine sent anything",
        "Check the engine and the timeouts of the harness. The engine may have sampled tokens that were not delivered.",
    )
    UNREADABLE_REPLY = (
        "unreadable-reply",
        "parts of the reply",
        "some chunks of the reply are not chat completion chunks",
        "Check for a gateway that rewrites or cuts replies, and report its version.",
    )
    INCONSISTENT_REPLY = (
        "inconsistent-reply",
        "parts of the reply",
        (
            "the figures of the reply contradict each other or the model: another number of ids than the engine counted, ids outside "
            "of the vocabulary, or ids after the end; only ids that are certain are recorded ([faults](faults.md#replies))"
        ),
        "Check for a gateway that rewrites or cuts replies, and report its version. The detail says what differs.",
    )
    UNFINISHED_REPLY = (
        "unfinished-reply",
        "the rest of the reply",
        "the reply ended without a finish reason",
        "Check for a gateway that rewrites or cuts replies, and report its version.",
    )
    MISSING_CHOICES = (
        "missing-choices",
        "some choices of the reply",
        "the reply has fewer choices than the request asked for",
        "Check for a gateway that rewrites or cuts replies, and report its version.",
    )
    REPLY_NOT_READ = (
        "reply-not-read",
        "the turn of this call",
        "the engine's reply was not read, because requests held as many bytes in memory as they may; the client got 503",
        "Raise `--request-memory`, or request streams, fewer choices or no top log probabilities ([budgets](budgets.md)).",
    )
    UNRECORDED_ROUTE = (
        "unrecorded-route",
        "the turn of this call",
        "the harness sampled tokens over a route that is passed through without recording",
        "Configure the harness to use a recorded route ([dialects](dialects.md)).",
    )
    TORN_RECORD = (
        "torn-record",
        "parts of the session",
        "the stored records of the session do not fit together",
        "Check whether Redis was restored, edited, or written by another version. Discard the session.",
    )
    REWARD_OUTDATED = (
        "reward-outdated",
        "the reward of a sequence",
        "turns that were recorded after the reward of a sequence was set joined that sequence, or the end of it, to another one",
        "Set the rewards again. Finish a session, and wait for its calls, before you reward its sequences.",
    )
    REPLICA_LOST = (
        "replica-lost",
        "the turn of this call's first attempt",
        "a proxy died during this call, and a retry of the call ended it ([repeated calls](retries.md))",
        "Find out why the proxy died. The harness got its reply from another proxy.",
    )
    SEALED_EARLY = (
        "sealed-early",
        "what the rollout would have recorded later",
        "the session was sealed by force before it was finished, or while calls were in flight",
        "Finish the session and wait for its calls before you seal it.",
    )
    INTERNAL_ERROR = (
        "internal-error",
        "the turn of this call",
        "tokencache failed to record the reply",
        "Report the traceback in the log: this is a bug in tokencache.",
    )
    # Not holes.
    RETRY_JOINED = (
        "retry-joined",
        "",
        "a repeated call got the reply of a call that was still in progress",
        "Use longer timeouts in the harness if there are many.",
    )
    RETRY_REPLAYED = (
        "retry-replayed",
        "",
        "a repeated call got the recorded reply of the call that it repeats",
        "Use longer timeouts in the harness if there are many.",
    )
    CLIENT_GONE = (
        "client-gone",
        "",
        "the harness disconnected during a stream (its turn ends there) or before an engine took the call, or its request came too slowly",
        "None: harnesses do this on Escape and on timeouts.",
    )
    ENGINE_DISAGREES = (
        "engine-disagrees",
        "",
        (
            "the engine used other prompt ids than were sent; the turn is recorded with the ids that the engine used, and the detail says "
            "how they differ"
        ),
        "See the alert `TokencacheEngineDisagrees`.",
    )
    PREFIX_DIFFERS = (
        "prefix-differs",
        "",
        (
            "the engine was named its prompt by a hash, and answered with another hash or with none; that answer was not used, and the "
            "call was sent again with all ids ([prefixes](prefixes.md))"
        ),
        "Restart that engine (the log names it): its memory is wrong, or a router sent the call to an engine without the plugin.",
    )
    ENGINE_REFUSED = (
        "engine-refused",
        "",
        (
            "the engine refused the call; nothing was sampled. With `--return-token-id-information`, a prompt that is too long is answered "
            "with an empty completion, and the detail reports this"
        ),
        "Read the detail; usually the prompt is too long ([NeMo Gym](topologies/nemo-gym.md)).",
    )
    CALL_REFUSED = (
        "call-refused",
        "",
        (
            "the proxy refused a call of a session that exists, for what the call says (4xx); nothing was sampled. Until the next turn, "
            "further such calls are the same incident"
        ),
        "Read the detail: it names what is wrong, or not supported ([dialects](dialects.md)).",
    )
    UPSTREAM_DOWN = (
        "upstream-down",
        "",
        "no engine could be reached; nothing was sampled",
        "Start an engine. The harness got an error.",
    )
    REQUEST_NOT_READ = (
        "request-not-read",
        "",
        "a call was refused with 503, because requests held as many bytes in memory as they may; nothing was sampled",
        "Raise `--request-memory`, or add replicas ([budgets](budgets.md#memory)).",
    )
    WORDS_DIFFER = (
        "words-differ",
        "",
        "a reply was continued after the engine had broken it off, and the client received other words than those of its tokens",
        "Check that the engine and the render sidecar have the same parsers.",
    )
    HELD = (
        "held",
        "",
        "the call waited because no engine took it, and was answered later ([several engines](several-engines.md))",
        "None, unless it happens often: then add engines.",
    )
    ENGINE_ABORTED = (
        "engine-aborted",
        "",
        (
            "the engine ended a reply by itself, as at weight updates; the turn is recorded up to there, and the detail says whether the "
            "harness received it"
        ),
        "None at weight updates ([several engines](several-engines.md)).",
    )
    NO_LOGPROBS = (
        "no-logprobs",
        "",
        "the engine returned no log probabilities for the completion, or values that are none; it is kept as context with mask 0",
        "Check that the engine returns log probabilities.",
    )
    LATE_CALL = (
        "late-call",
        "",
        "a call arrived after the session was finished or sealed, and was refused; after the 16th only the 32nd, 64th, … are recorded",
        "Stop the harness before you finish the session.",
    )
    ROLLOUT_CANCELED = (
        "rollout-canceled",
        "",
        "the rollout was finished as `canceled`: somebody ended it early, for example a trainer after too many failures of others",
        "Read the detail. None if that was meant: the session is not valid, so nothing of it is trained.",
    )
    BUDGET_SPENT = (
        "budget-spent",
        "",
        (
            "a call arrived when the [budget](budgets.md) of the session was used up, and got a final reply from the proxy; "
            "after the 16th only the 32nd, 64th, … are recorded"
        ),
        "If there are many in one session, its harness does not accept the final reply as the end.",
    )
    ECHO_DIFFERS = (
        "echo-differs",
        "",
        "the messages contain token ids (as NeMo Gym's agents send them) that were not recorded with this text; the ids are not used",
        "Check the agent: it changed the ids or the text of a message.",
    )
    ECHO_UNRECORDED = (
        "echo-unrecorded",
        "",
        "the messages contain token ids that are not recorded here; the detail says whether the prompt begins with them",
        "Use a store that persists, and one store for all proxies.",
    )
    EXPERTS_LOST = (
        "experts-lost",
        "",
        "the routed experts could not be written; all tokens are recorded",
        "Check that the directory named by `--experts` is writable.",
    )


_WITHOUT_REPLY = frozenset(
    {
        *(kind for kind in IncidentKind if kind.hole),
        IncidentKind.ENGINE_REFUSED,
        IncidentKind.CALL_REFUSED,
        IncidentKind.UPSTREAM_DOWN,
        IncidentKind.CLIENT_GONE,
    }
)


def failed_calls(incidents: Iterable[Incident], recorded: Collection[str]) -> list[Incident]:
    """Return the incidents of calls that ended without a turn, the last one of each call, oldest first; `recorded` are the other calls."""
    found = {one.call: one for one in incidents if one.call and one.call not in recorded and one.kind in _WITHOUT_REPLY}
    return sorted((one for one in found.values() if one.kind != IncidentKind.CALL_OPEN), key=lambda one: one.at)


def sealed_early(*, finished: bool, open_calls: int, at: float) -> Incident:
    """Make the incident of a session that was sealed by force although it was not finished or calls were in flight."""
    calls = f"{open_calls} {'call was' if open_calls == 1 else 'calls were'} in flight"
    state = "finished" if finished else "not finished"
    return IncidentKind.SEALED_EARLY.incident(f"sealed by force while it was {state} and {calls}", at=at)

"""Defines what is known of a call: from its beginning on, when it is planned for an engine, and at its end.

What arrives while a call runs stays with the party that knows it: the source has the reply and its pieces, the dispatch has the plan and
the engine, the states say what the client did. At the end `CallAttempt` makes `CallFacts` of them, once, and `recorder.turns_of` makes the
turns of these facts.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from tokencache.core.forced import ThinkingMarks
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.turn import ReplyPiece
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.derender import Derender
from tokencache.engine.figures import Judgement
from tokencache.engine.model import Engine, Model
from tokencache.engine.reply import Reply
from tokencache.proxy.plan import Plan
from tokencache.proxy.policy_version import PieceVersions, VersionReading
from tokencache.store.clock import RECORD_CLOCK


class BegunCall(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a call from its beginning on.

    Attributes:
        id: the call's id.
        session: the session's name.
        chat: the request.
        fingerprint: the request fingerprint; `b""` if retries are not deduplicated.
        started: when the call began, Unix time in seconds.
        offset: that of the clock of records then (`SteadyClock`): the call lasts as long as it does, also if that clock is set meanwhile.
        noted: incidents that were found while it runs.
    """

    id: str
    session: str
    chat: ChatCall
    fingerprint: bytes = b""
    started: float
    offset: float = 0.0
    noted: list[Incident] = []

    def incident(self, kind: IncidentKind, detail: str = "", *, hole: bool | None = None, status: int = 0) -> Incident:
        """Make an incident of this call."""
        return kind.incident(detail, call=self.id, hole=hole, at=RECORD_CLOCK.now(), status=status)

    def left(self, detail: str) -> Incident:
        """Make the incident of a client that left.

        Its time is that at which the call began: the client's next call may begin before its leaving is noticed.
        """
        return IncidentKind.CLIENT_GONE.incident(detail, call=self.id, at=self.started)

    def note(self, kind: IncidentKind, detail: str, *, hole: bool | None = None) -> None:
        """Keep an incident until the end of the call."""
        self.noted.append(self.incident(kind, detail, hole=hole))


class PlannedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it is planned for one engine.

    Attributes:
        engine: the engine.
        at: the key of its endpoint.
        rank: the data-parallel rank to which the session is pinned; `None` if the engine has only one.
        model: the model; `None` if the engine could not be probed.
        frozen: the names of models that are not trained.
        plan: how it is sent.
        weights: the readings of the engine's policy version.
        budget: the request's thinking budget, in tokens; `None` if it has none.
        thinking: the ids around a thought; `None` if they are not known, or if the request has no thinking budget.
        whole: whether the request asks for a whole reply although the client requested a stream.
        gathers: whether the request asks for a stream, and a whole reply is made from it.
        continues: makes the words of a reply that is continued because the engine broke it off; `None` if none is continued.
        again: why not, if the request or the model is the reason.
    """

    engine: Engine
    model: Model | None
    plan: Plan
    weights: VersionReading
    at: str = ""
    rank: int | None = None
    frozen: frozenset[str] = frozenset()
    budget: int | None = None
    thinking: ThinkingMarks | None = None
    whole: bool = False
    gathers: bool = False
    continues: Derender | None = None
    again: str = ""

    def rendered(self, reason: str) -> "PlannedCall":
        """Return the call as it is sent if the engine renders it, for a `reason`."""
        return msgspec.structs.replace(self, plan=self.plan.rendered(reason))


class EndedPiece(NamedTuple):
    """A piece of a reply that an engine broke off, and the policy versions of its tokens."""

    piece: ReplyPiece
    versions: PieceVersions


class RequestSample(NamedTuple):
    """Which sample of its request a call is.

    Attributes:
        second: whether a call with the same fingerprint has a whole reply.
        never_answered: whether no client received the reply of such a call.
        documents: documents to store if the call ends without a turn.
    """

    second: bool = False
    never_answered: bool = False
    documents: Mapping[str, bytes] = MappingProxyType({})

    @property
    def of_answered(self) -> bool:
        """Whether a client received the reply of an equal call: this one may be late, as the network may deliver a call after its retry."""
        return self.second and not self.never_answered


FIRST_SAMPLE = RequestSample()


class CallFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A call that has ended.

    Attributes:
        call: the call.
        epoch: the session's epoch when the call began; `""` if the store did not answer.
        planned: how it was planned for the engine that sampled last.
        request: the id of the request that was sent last.
        late_grammar: see `EngineRequest.late_grammar`.
        reply: the engine's reply.
        pieces: its pieces that were continued; empty if it has no others.
        again: why a reply that an engine broke off was not continued.
        mark: why the reply is incomplete: `aborted` (the client left), `upstream-broke`, `engine-aborted` (the client received nothing of
            it), `internal-error`, or `""`. `detail` is the same in words.
        judged: what the figures of the reply prove.
        unanswered: whether the client had left before the reply was complete.
        sample: which sample of its request it is.
        experts: choice → the file of its routed experts, and its first token (`Turn.experts_start`).
        media_kept: whether the bytes of its media are stored, as far as they are known.
        ended: when the reply ended, Unix time in seconds.
    """

    call: BegunCall
    epoch: str
    planned: PlannedCall
    request: str = ""
    late_grammar: bool = False
    reply: Reply
    pieces: Sequence[EndedPiece] = ()
    again: str = ""
    mark: str = ""
    detail: str = ""
    judged: Judgement
    unanswered: bool = False
    sample: RequestSample = FIRST_SAMPLE
    experts: Mapping[int, tuple[str, int]] = {}
    media_kept: bool = True
    ended: float

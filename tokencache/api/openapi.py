"""The trainer's HTTP API as data: the table of its operations, and the OpenAPI 3.1 document made from the table.

Handlers are registered by the id of their operation, so each path is written once. `GET /tokencache/v1/openapi.json` serves the
document, and `docs/openapi.json` is a copy of it. The schemas come from the msgspec types that the client decodes.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import msgspec
from aiohttp import web

from tokencache import __version__
from tokencache.api import requests
from tokencache.api.auth import AdminAuth, Handler
from tokencache.api.http import refuse_parameters
from tokencache.api.listing import MAX_LIMIT, STAGES
from tokencache.core.media import StoredMedium
from tokencache.core.session import LabelChanges, NewFork, NewSession
from tokencache.engine.admission import MOST_WAIT_SECONDS
from tokencache.store.base import Binding
from tokencache.trajectories import values
from tokencache.trajectories.formats.registry import FORMATS
from tokencache.trajectories.lengths import ExportParameters
from tokencache.trajectories.reports import PASSING, RunLine, RunReport
from tokencache.trajectories.summaries import SESSION_STATES, SORTS

BASE = "/tokencache/v1"
_SCHEMA_PATH = "#/components/schemas/{name}"

DRIFT_MODES = ("off", "sequences", "turns")


class RegisteredKey(Binding, frozen=True):
    """A registered API key: `key` is the secret for the harness, `id` revokes it.

    `public_url` is `--public-url`, and `base_url` that of the session for OpenAI clients. A proxy without the option names neither.
    """

    key: str = ""
    id: str = ""
    public_url: str = ""
    base_url: str = ""
    deadline: float = 0.0
    silent_for: float = 0.0
    warnings: tuple[str, ...] = ()


class ForkedSession(RegisteredKey, frozen=True):
    """A fork and its key. `forked_from` is the session that it left, after `turn`; it shares `shared` turns with it."""

    forked_from: str = ""
    turn: str = ""
    shared: int = 0


class CreatedSession(values.SessionState, frozen=True, kw_only=True):
    """A new session. `public_url` and `base_url` as in `RegisteredKey`; `warnings` say what its trainer should know."""

    public_url: str = ""
    base_url: str = ""
    warnings: tuple[str, ...] = ()


class EngineUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names an engine by its base URL, such as `http://10.0.0.7:8000`."""

    url: str


class Parameter(NamedTuple):
    """A query parameter: its name, what it does, and its JSON schema."""

    name: str
    description: str
    schema: Mapping[str, Any]
    required: bool = False


class Operation(NamedTuple):
    """A route of the trainer's API.

    Attributes:
        id: OpenAPI's `operationId`, by which its handler is registered.
        route: method and path below `BASE`.
        summary: what it does, in one line.
        answer: type or JSON schema of the body of a successful answer.
        content_type: media type of that body.
        description: further information for callers.
        query: its query parameters.
        body: type of the request body; `None` if it has none.
        statuses: status codes of success; the first is the usual one.
        errors: further status codes of failure and when they occur. `_COMMON_ERRORS` apply to every operation, `_NOT_FOUND` to its path.
    """

    id: str
    route: str
    summary: str
    answer: Any
    description: str = ""
    query: tuple[Parameter, ...] = ()
    body: type[msgspec.Struct] | None = None
    statuses: tuple[int, ...] = (HTTPStatus.OK,)
    content_type: str = "application/json"
    errors: Mapping[HTTPStatus, str] = {}

    @property
    def method(self) -> str:
        """The method, in upper case."""
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        """The whole path; names in braces stand for any text."""
        return BASE + self.route.partition(" ")[2]


def _list(items: Any) -> dict[str, Any]:
    """Make the schema of a JSON array of values of a type or JSON schema."""
    return {"type": "array", "items": items}


def _object(**members: Any) -> dict[str, Any]:
    """Make the schema of a JSON object in which all members are required. A member is a type, or a JSON schema."""
    return {"type": "object", "properties": members, "required": list(members)}


_TEXT, _FLAG, _COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
_ARRAY = {"type": "array"}
_OFF = {**_FLAG, "default": False}
_ANY_OBJECT = {"type": "object"}
_NOT_FOUND = {
    "session": {HTTPStatus.NOT_FOUND: "There is no such session."},
    "turn": {HTTPStatus.NOT_FOUND: "There is no such session or turn."},
    "sequence": {HTTPStatus.NOT_FOUND: "There is no such session or sequence."},
    "key": {HTTPStatus.NOT_FOUND: "There is no such key."},
}
"""The error for what a path names, by the last name in the path."""
_EXISTS = {
    HTTPStatus.CONFLICT: "The session exists (`session_exists`), or has other settings (`settings_conflict`).",
    HTTPStatus.TOO_MANY_REQUESTS: "Too many finished sessions are ready and not taken (`too_many_ready`, `--max-ready`), or the KV caches "
    "have no room (`no_room`, `--admission`). `Retry-After` says when to repeat it.",
    HTTPStatus.SERVICE_UNAVAILABLE: "`--admission` is set, and the size of no KV cache is known (`capacity_unknown`), or the store failed.",
}
_WAIT = Parameter(
    "wait",
    "Seconds to wait for room in the KV caches, with `--admission`.",
    {"type": "integer", "minimum": 0, "maximum": MOST_WAIT_SECONDS, "default": 0},
)
_OTHER_STORE = {HTTPStatus.UNPROCESSABLE_ENTITY: "A delivery is another store's, or a member is invalid."}
_EXPIRED = {
    **_OTHER_STORE,
    HTTPStatus.CONFLICT: "The lease of a delivery ended, and its sessions were released or given to another consumer.",
}
_NUMBERS = "a number, a range such as `>0.5`, `<=3` or `1..3` (both ends included), or `none`"
_NO_VERSION = {HTTPStatus.UNPROCESSABLE_ENTITY: "`max_lag` is given, and no policy version was ever announced (`weights_unknown`)."}
_NO_ENGINE = {HTTPStatus.NOT_FOUND: "There is no such engine."}
_UPDATE_ERRORS = {
    HTTPStatus.CONFLICT: "The update is not under way (`weights_conflict`).",
    HTTPStatus.BAD_GATEWAY: "An engine could not be resumed; repeat the request.",
}
_DRIFT = Parameter(
    "drift",
    "Whether prompts are compared with plain renderings: not at all, those of the last turn of each sequence, or those of all turns.",
    {"type": "string", "enum": DRIFT_MODES},
)


def _parameters(kind: type[msgspec.Struct]) -> tuple[Parameter, ...]:
    """Make a query parameter of each field of a struct."""
    members = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    return tuple(Parameter(name, member.pop("description"), member) for name, member in members.items())


_RECENT = Parameter(
    "recent",
    "Whether the answer may be a second old, or 20 times as old as listing all sessions takes. Use it to ask regularly.",
    _OFF,
)

_BY_LABEL = (
    Parameter("group", "Only sessions of this group.", _TEXT),
    Parameter("tag", "Only sessions with this tag.", _TEXT),
    Parameter("harness", "Only sessions of this harness.", _TEXT),
)

OPERATIONS = (
    Operation(
        "listSessions",
        "GET /sessions",
        "List sessions, all of them or a page.",
        _object(sessions=_list(values.SessionState), cursor={"type": ["string", "null"]}),
        description="Without `limit` and `cursor` the answer has all sessions that match. A page may have fewer than `limit`, or none; "
        "the last one has the cursor `null`. A session that exists during the whole walk is listed at least once.",
        query=(
            Parameter("limit", "Number of sessions to return at most, about.", {**_COUNT, "maximum": MAX_LIMIT}),
            Parameter("cursor", "Where the page begins: `cursor` of the page before.", _TEXT),
            Parameter("prefix", "Only sessions whose name begins with this text.", _TEXT),
            Parameter("state", "Only sessions in this state.", {"type": "string", "enum": STAGES, "default": "any"}),
            *_BY_LABEL,
            Parameter("outcome", "Only sessions with this outcome so far: `ok`, or a kind of failure.", _TEXT),
            Parameter("since", "Only sessions that were used at this time or later, as Unix time in seconds.", {"type": "number"}),
            Parameter("until", "Only sessions that were used at this time or earlier, as Unix time in seconds.", {"type": "number"}),
        ),
        errors={HTTPStatus.UNPROCESSABLE_ENTITY: "The cursor is another store's, a member is unknown, or a query parameter is misspelled."},
    ),
    Operation(
        "createSession",
        "POST /sessions",
        "Create a session with settings and labels.",
        CreatedSession,
        description="The settings hold for all calls of the session, however they name it. A session that exists is accepted only with "
        "`exist_ok` (200). The name of a deleted session can be used again.",
        query=(_WAIT,),
        body=NewSession,
        statuses=(HTTPStatus.CREATED, HTTPStatus.OK),
        errors=_EXISTS,
    ),
    Operation(
        "forkSession",
        "POST /sessions/{session}/fork",
        "Create a session that continues another one after a turn, and register an API key for it.",
        ForkedSession,
        description="The fork shares the turn and all that it refers to, without a copy of their tokens. It has the settings of the "
        "session, and labels of its own; its budget counts the shared turns. They have the mark `shared` and mask 0. The session may be in "
        "any state, and be deleted first.",
        body=NewFork,
        statuses=(HTTPStatus.CREATED,),
        errors={**_EXISTS, HTTPStatus.NOT_FOUND: "There is no such session or turn."},
    ),
    Operation("getSession", "GET /sessions/{session}", "Return the state of one session.", values.SessionState),
    Operation(
        "listTurns",
        "GET /sessions/{session}/turns",
        "List the turns of a session in the order in which they were recorded, without tokens.",
        _object(session=_TEXT, turns=_list(_ANY_OBJECT)),
    ),
    Operation(
        "getTrajectories",
        "GET /sessions/{session}/trajectories",
        "Return the sequences of a session for training.",
        {"anyOf": [values.Trajectory, _ANY_OBJECT]},
        description="The schema is that of the native format; other formats are JSON objects, too. `drift` is `sequences` by default in "
        "the native format, and `off` in others. `figures.overlong` and `figures.stale` report what the limits of length and lag did.",
        query=(
            Parameter("format", "Export format.", {"type": "string", "enum": list(FORMATS), "default": "native"}),
            _DRIFT,
            *_parameters(ExportParameters),
        ),
        errors=_NO_VERSION,
    ),
    Operation(
        "listMedia",
        "GET /sessions/{session}/media",
        "List the images and other media of a session whose bytes are stored.",
        _object(session=_TEXT, media=_list(StoredMedium)),
    ),
    Operation(
        "getMedium",
        "GET /sessions/{session}/media/{sha256}",
        "Return the bytes of an image or another medium, by the hexadecimal SHA-256 of these bytes.",
        {},
        description="The content type is the one that the harness declared, if it is one of a few types without scripts; otherwise it is "
        "`application/octet-stream`.",
        content_type="*/*",
        errors={HTTPStatus.NOT_FOUND: "There is no such session or medium, or the bytes of the medium were not kept."},
    ),
    Operation(
        "getDrift",
        "GET /sessions/{session}/drift",
        "Compare the prompts of a session with plain renderings of the same messages.",
        _object(session=_TEXT, turns=_ANY_OBJECT, unmeasured=_ANY_OBJECT),
        description="`turns` maps the id of each measured turn to `rendered`, `tokens`, `at` and `sites`; `unmeasured` maps that of each "
        "other turn to the reason. `drift` is `turns` by default.",
        query=(_DRIFT,),
    ),
    Operation(
        "scoreTurns",
        "POST /sessions/{session}/score",
        "Score the recorded replies of a session after edited messages.",
        values.EditedScores,
        description="Messages before a reply are inserted or replaced, such as by a hint. Every reply that the model sampled keeps its "
        "exact ids; the engine renders the rest. A turn for which that is not proven has `refused` and `error` in place of a "
        "score. Nothing is recorded. With `score: false`, only the edited prompts are returned, for an engine of yours. Each turn has its "
        "whole prompt, so the answer grows with the square of the session: name `turns` of a long one.",
        body=requests.ScoreEdited,
        errors={
            HTTPStatus.CONFLICT: "The engine's label of its weights changed meanwhile, or the records are torn (`torn_record`).",
            HTTPStatus.UNPROCESSABLE_ENTITY: "A member is invalid, two edits replace one message, or no chosen turn has the place of an "
            "edit. The message names the member.",
            HTTPStatus.BAD_GATEWAY: "The engine failed. No turn is returned.",
        },
    ),
    Operation(
        "labelSession",
        "PATCH /sessions/{session}",
        "Replace labels of a session.",
        values.SessionState,
        description="A label that is given replaces the old one as a whole; the others stay. Possible in every state.",
        body=LabelChanges,
    ),
    Operation(
        "finishSession",
        "POST /sessions/{session}/finish",
        "Finish a session: the rollout is over.",
        values.SessionState,
        description="New calls receive 409 (`session_finished`); calls in flight end normally. The session enters the queue. A reward and "
        "labels may be given, as with `setReward` and `labelSession`. `failed` says that the rollout failed, and how: `engine`, `harness`, "
        "`sandbox`, `timeout`, `budget`, `canceled`, `store`, or a word of your own; `ok` says that nothing failed, whatever the proxy "
        "saw. `detail` says it in words. Finishing again has no effect, except that a reward that is given again is stored again, and "
        "that an outcome may still be given where none was, until the session is sealed.",
        body=requests.Finish,
        errors={HTTPStatus.CONFLICT: "It has another outcome, or is sealed without that one (`outcome_conflict`). Nothing was changed."},
    ),
    Operation(
        "sealSession",
        "POST /sessions/{session}/seal",
        "Seal a session: what is recorded does not change any more.",
        values.SessionState,
        description="New calls receive 409 (`session_sealed`). With `force`, a session is sealed that is not finished or has calls in "
        "flight; the incident `sealed-early` then reports what was cut. Sealing again has no effect.",
        query=(Parameter("force", "Seal it even if it is not finished or has calls in flight.", _OFF),),
        errors={HTTPStatus.CONFLICT: "It is not finished (`session_open`), or calls are in flight (`calls_in_flight`)."},
    ),
    Operation(
        "setReward",
        "PUT /sessions/{session}/reward",
        "Store the reward of a session.",
        values.RewardState,
        description="Possible in every state. It replaces the reward before as a whole; the history keeps the last 100. `turns` and "
        "`sequences` give rewards by id.",
        body=requests.NewReward,
        errors={
            HTTPStatus.UNPROCESSABLE_ENTITY: "A number is not finite or too large, or a turn or sequence is unknown. The message names it."
        },
    ),
    Operation(
        "getReward", "GET /sessions/{session}/reward", "Return the reward of a session, and those that it replaced.", values.RewardState
    ),
    Operation(
        "deleteSession",
        "DELETE /sessions/{session}",
        "Delete a session.",
        _object(session=_TEXT, deleted=_FLAG),
        description="Calls that are in flight are dropped when they end. New calls receive 409 (`session_deleted`) for an hour.",
        query=(Parameter("reuse", "Let the name be used again at once.", _OFF),),
    ),
    Operation(
        "registerKey",
        "POST /keys",
        "Create a session, and register an API key for it.",
        RegisteredKey,
        description="The body is that of `createSession`. The answer holds the secret `key` and the `id` that revokes it.",
        query=(_WAIT,),
        body=NewSession,
        statuses=(HTTPStatus.CREATED,),
        errors=_EXISTS,
    ),
    Operation(
        "revokeKey",
        "DELETE /keys/{key}",
        "Revoke an API key by its id.",
        _object(id=_TEXT, revoked=_FLAG),
        description="Harnesses that use the key receive 401 from their next call on. Calls in flight continue.",
    ),
    Operation(
        "awaitSessions",
        "POST /wait",
        "Wait until some of the given sessions are finished and have no call in flight.",
        _object(finished=_list(values.SessionState), unknown=_list(_TEXT)),
        description="Answers as soon as a session is, at the latest after `wait` seconds. `finished` has at most 100 of them. `unknown` "
        "names sessions that do not exist.",
        body=requests.Await,
    ),
    Operation(
        "getQueue",
        "GET /queue",
        "Count the finished sessions that consumers have not acknowledged, and describe the groups of those that no consumer has taken.",
        values.QueueState,
    ),
    Operation(
        "takeDeliveries",
        "POST /queue/take",
        "Take finished sessions from the queue, and seal them.",
        _object(deliveries=_list(values.DeliveryState)),
        description="A delivery has `group_size` sessions of one group, and belongs to the consumer for `lease` seconds. With `min_group` "
        "and `group_timeout` (seconds) a group that has waited so long is delivered with fewer (`missing`). Deliveries that "
        "the consumer took before and does not name in `holding` come first, so a consumer that was restarted gets them again. Answers as "
        "soon as there is a delivery, at the latest after `wait` seconds.",
        body=requests.Take,
        errors=_OTHER_STORE,
    ),
    Operation(
        "acknowledgeDeliveries",
        "POST /queue/acknowledge",
        "Remove processed deliveries from the queue, and delete their sessions.",
        _object(acknowledged=_list(_TEXT), deleted=_COUNT),
        description="Acknowledging again has no effect.",
        body=requests.Acknowledge,
        errors=_EXPIRED,
    ),
    Operation(
        "releaseDeliveries",
        "POST /queue/release",
        "Give deliveries back to the queue.",
        _object(released=_list(_TEXT)),
        body=requests.Deliveries,
        errors=_OTHER_STORE,
    ),
    Operation(
        "extendDeliveries",
        "POST /queue/extend",
        "Extend the leases of deliveries.",
        _object(extended=_list(_TEXT)),
        body=requests.Extend,
        errors=_EXPIRED,
    ),
    Operation(
        "listEngines",
        "GET /engines",
        "List the engines.",
        _object(engines=_list(values.EngineState)),
        description="`calls` are those in flight in the process that answers, and those of all replicas once the engine is drained.",
    ),
    Operation(
        "getCapacity",
        "GET /capacity",
        "Return how many tokens the KV caches of the engines hold, and how many sessions fit.",
        values.Capacity,
    ),
    Operation(
        "getConditions",
        "GET /conditions",
        "Say under which conditions the process that answers records now: versions, settings, adapters and engines.",
        values.Conditions,
    ),
    Operation(
        "addEngine",
        "POST /engines",
        "Let an engine accept calls: a new one, or one that was drained.",
        values.EngineState,
        description="All replicas use it. 201 if the engine is new, 200 if it was known. The proxy probes it before it answers, for "
        "at most 10 seconds. `error` is the reason if it does not serve: it differs from the engines that serve, or was not probed yet.",
        body=EngineUrl,
        statuses=(HTTPStatus.CREATED, HTTPStatus.OK),
    ),
    Operation(
        "drainEngine",
        "POST /engines/drain",
        "Send no new calls to an engine. Calls in flight continue.",
        values.EngineState,
        body=EngineUrl,
        errors=_NO_ENGINE,
    ),
    Operation(
        "removeEngine",
        "DELETE /engines",
        "Remove a drained engine.",
        _object(url=_TEXT, removed=_FLAG),
        query=(
            Parameter("url", "Base URL of the engine.", _TEXT, required=True),
            Parameter("force", "Remove it even if it is not drained. Calls in flight continue.", _OFF),
        ),
        errors={
            **_NO_ENGINE,
            HTTPStatus.CONFLICT: "It is not drained (`engine_in_use`), or `--upstream` names it (`engine_configured`).",
        },
    ),
    Operation("getWeights", "GET /weights", "Return what trainers announced about the weights of the engines.", values.WeightsInfo),
    Operation(
        "setWeights",
        "PUT /weights",
        "Announce the version of the weights, or that they are being replaced.",
        values.WeightsInfo,
        description="All replicas use it. While the phase is `updating`, new calls wait. The same version again changes nothing.",
        body=requests.NewVersion,
        errors={**_NO_ENGINE, HTTPStatus.CONFLICT: "Another owner is updating the weights (`weights_conflict`)."},
    ),
    Operation(
        "beginWeightUpdate",
        "POST /weights/update",
        "Begin an update of the weights: new calls wait, and the engines are paused.",
        values.WeightsInfo,
        description="The answer has the `id` of the update. If an engine cannot be paused, the others are resumed and nothing is held.",
        body=requests.NewUpdate,
        statuses=(HTTPStatus.CREATED,),
        errors={
            **_NO_ENGINE,
            HTTPStatus.CONFLICT: "Another owner is updating (`weights_conflict`), or an engine cannot pause (`engine_not_paused`).",
        },
    ),
    Operation(
        "finishWeightUpdate",
        "POST /weights/update/{update}/finish",
        "End an update: set the version of the new weights, and resume the engines.",
        values.WeightsInfo,
        description="Finishing again with the same version resumes the engines again.",
        body=requests.FinishedUpdate,
        errors=_UPDATE_ERRORS,
    ),
    Operation(
        "cancelWeightUpdate",
        "DELETE /weights/update/{update}",
        "End an update whose result is not known: the version becomes unknown, and the engines are resumed.",
        values.WeightsInfo,
        errors=_UPDATE_ERRORS,
    ),
    Operation(
        "listSummaries",
        "GET /summaries",
        "List sessions a page at a time, for the viewer.",
        _object(total=_COUNT, found=_COUNT, offset=_COUNT, states=_ANY_OBJECT, now={"type": "number"}, sessions=_ARRAY),
        query=(
            Parameter("contains", "Only sessions whose name contains this text.", _TEXT),
            Parameter("state", "Only sessions in this state.", {"type": "string", "enum": SESSION_STATES, "default": "any"}),
            *_BY_LABEL,
            Parameter("model", "Only sessions of this model.", _TEXT),
            Parameter("run", "Only sessions of this run: with the tag `run:ID`.", _TEXT),
            Parameter("outcome", "Only sessions with this outcome: `ok`, or a kind of failure.", _TEXT),
            Parameter("incident", "Only sessions with an incident of this kind.", _TEXT),
            Parameter("version", "Only sessions whose newest token this policy version sampled.", _TEXT),
            Parameter("reward", f"Only sessions with such a reward: {_NUMBERS}.", _TEXT),
            Parameter("turns", "Only sessions with so many turns, written in the same way.", _TEXT),
            Parameter("tokens", "Only sessions with so many sampled tokens, written in the same way.", _TEXT),
            Parameter(
                "sort",
                "What to sort by; `-` before it reverses the order. Sessions without a value come last.",
                {"type": "string", "enum": [way + name for name in SORTS for way in ("", "-")], "default": "-used"},
            ),
            Parameter("offset", "Number of sessions to skip.", {**_COUNT, "default": 0}),
            Parameter("limit", "Number of sessions to return.", {**_COUNT, "maximum": 500, "default": 100}),
        ),
    ),
    Operation(
        "listRuns",
        "GET /runs",
        "List the runs: the sessions with one tag `run:ID` each, the last used first.",
        _object(runs=_list(RunLine)),
        description="At most 1,000 runs.",
        query=(_RECENT,),
    ),
    Operation(
        "reportRun",
        "GET /runs/report",
        "Return the figures of a run, of all sessions with a tag, or of all sessions.",
        RunReport,
        description="Failed rollouts are in no distribution and in no pass rate, unless `failed` is true. `groups` is a page: those from "
        "`offset` on, at most `limit`.",
        query=(
            Parameter("run", "Only sessions with the tag `run:ID` of this run.", _TEXT),
            Parameter("tag", "Only sessions with this tag.", _TEXT),
            Parameter("passing", "A rollout passes if its reward is at least this.", {"type": "number", "default": PASSING}),
            Parameter("failed", "Whether the distributions count failed rollouts, too.", _OFF),
            Parameter("offset", "Number of groups to skip.", {**_COUNT, "default": 0}),
            Parameter("limit", "Number of groups to return.", {**_COUNT, "maximum": 1000, "default": 100}),
            _RECENT,
        ),
        errors={HTTPStatus.NOT_FOUND: "No session is in this run, or has this tag."},
    ),
    Operation(
        "compareGroup",
        "GET /comparison",
        "Compare the sessions of a group: rewards, advantages, last answers, lengths, and where their tokens part, for the viewer.",
        _object(group=_TEXT, waits=_TEXT, found=_COUNT, values=_ANY_OBJECT, members=_ARRAY, not_compared=_ARRAY, shared=_COUNT, parting={}),
        description="At most 64 sessions are compared, the ones used last.",
        query=(Parameter("group", "Name of the group.", _TEXT, required=True),),
        errors={HTTPStatus.NOT_FOUND: "No session is in this group."},
    ),
    Operation(
        "getOutline",
        "GET /sessions/{session}/outline",
        "Return the turns of a session as a tree of sequences, with figures and incidents, for the viewer.",
        _ANY_OBJECT,
    ),
    Operation(
        "listChanges",
        "GET /sessions/{session}/changes",
        "Say for each turn of a session what changed in its request, in the order in which the turns were recorded, and list its links.",
        _object(session=_TEXT, changes=_list(values.TurnChange), links=_list(values.Link)),
        description="A request is compared with the history of the turn that it could have continued: that turn's request and its reply.",
        errors={HTTPStatus.CONFLICT: "The records are torn (`torn_record`)."},
    ),
    Operation(
        "getTurn",
        "GET /sessions/{session}/turns/{turn}",
        "Return one turn, what changed in its request, and each reply in its history next to what was served, for the viewer.",
        _ANY_OBJECT,
    ),
    Operation(
        "getSequence",
        "GET /sessions/{session}/sequences/{sequence}",
        "Return the runs of tokens of one kind in a sequence, for the viewer.",
        _object(session=_TEXT, id=_TEXT, model=_TEXT, tokens=_COUNT, turns=_list(_TEXT), runs=_ARRAY, media={}),
    ),
    Operation(
        "getTokens",
        "GET /sessions/{session}/sequences/{sequence}/tokens",
        "Return ids, log probabilities and texts of at most 4,096 tokens of a sequence, for the viewer.",
        _object(start=_COUNT, end=_COUNT, ids=_list(_COUNT), logprobs=_ARRAY, texts={}, unread=_TEXT),
        query=(Parameter("start", "First token.", {**_COUNT, "default": 0}), Parameter("end", "Token after the last one.", _COUNT)),
    ),
    Operation(
        "getMessages",
        "GET /sessions/{session}/sequences/{sequence}/messages",
        "Return at most 100 messages of the conversation of a sequence, for the viewer.",
        _object(messages=_COUNT, kept=_FLAG, starts=_list(_COUNT), start=_COUNT, end=_COUNT, window=_ARRAY),
        description="`starts` holds the first token of each message of the conversation. Texts of several messages are cut after 4,000 "
        "characters; those of one message after 1,000,000.",
        query=(Parameter("start", "First message.", {**_COUNT, "default": 0}), Parameter("end", "Message after the last one.", _COUNT)),
    ),
    Operation(
        "getTexts",
        "GET /sessions/{session}/texts",
        "Return the texts of token ids, as the model of a turn reads them, for the viewer.",
        _object(ids=_list(_COUNT), texts={}, unread=_TEXT),
        query=(
            Parameter("turn", "Id of the turn.", _TEXT, required=True),
            Parameter("ids", "Token ids, separated by commas; at most 4,096.", _TEXT),
        ),
        errors={HTTPStatus.NOT_FOUND: "There is no such session or turn."},
    ),
    Operation("getOpenapi", "GET /openapi.json", "Return this document.", _ANY_OBJECT),
)

_BY_ID = {operation.id: operation for operation in OPERATIONS}
_PARAMETERS = frozenset(parameter.name for operation in OPERATIONS for parameter in operation.query)


def register(app: web.Application, auth: AdminAuth, handlers: Mapping[str, Handler]) -> None:
    """Add handlers, by the ids of their operations, to an application.

    `auth` checks the admin key. HEAD is answered where GET is. A query parameter that is misspelled, or another operation's, is refused
    with 422. An operation without a body ignores one: HTTP clients and proxies may add it.
    """
    for name, handler in handlers.items():
        operation = _BY_ID[name]
        checked = auth(_checked(operation, handler))
        if operation.method == "GET":
            app.router.add_get(operation.path, checked)
        else:
            app.router.add_route(operation.method, operation.path, checked)


def _checked(operation: Operation, handler: Handler) -> Handler:
    parameters = [parameter.name for parameter in operation.query]

    async def checked(request: web.Request) -> web.StreamResponse:
        refuse_parameters(request, parameters, _PARAMETERS)
        return await handler(request)

    return checked


def document() -> dict[str, Any]:
    """Build the OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.1.html) as JSON values."""
    types = list(dict.fromkeys(_types_in([(operation.answer, operation.body) for operation in OPERATIONS])))
    _, components = msgspec.json.schema_components(types, ref_template=_SCHEMA_PATH)
    for operation in OPERATIONS:
        if operation.body is not None:
            components[operation.body.__name__]["additionalProperties"] = False
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    summary = "The trainer's API of tokencache: sessions, trajectories, API keys and engines."
    written = {
        "openapi": "3.1.1",
        "info": {"title": "tokencache", "version": __version__, "summary": summary},
        "security": [{"adminKey": []}, {"adminPassword": []}],
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}, "securitySchemes": _ADMIN},
    }
    return cast("dict[str, Any]", msgspec.json.decode(msgspec.json.encode(written)))  # tuples become lists


_ADMIN = {
    "adminKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "The key that `--admin-key` sets. Without that option the routes are public.",
    },
    "adminPassword": {
        "type": "http",
        "scheme": "basic",
        "description": "For GET only: the admin key as the password, with any user name.",
    },
}
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT))
_COMMON_ERRORS = {
    HTTPStatus.BAD_REQUEST: "A name, a parameter or the body is invalid.",
    HTTPStatus.UNAUTHORIZED: "The admin key is missing or wrong.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "The body has unknown members, or a query parameter is misspelled. The message names them.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The store failed.",
}


def _described(operation: Operation) -> dict[str, Any]:
    """Make the OpenAPI Operation Object of an operation."""
    named = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in named]
    parameters += [{**parameter._asdict(), "in": "query"} for parameter in operation.query]
    answer = {"description": "Success.", "content": {operation.content_type: {"schema": _schema(operation.answer)}}}
    missing = _NOT_FOUND.get(named[-1], {}) if named else {}
    failures = {**_COMMON_ERRORS, **missing, **operation.errors}
    written = {
        "operationId": operation.id,
        "summary": operation.summary,
        "description": operation.description,
        "parameters": parameters,
        "requestBody": operation.body and {"required": True, "content": _json(operation.body)},
        "responses": {
            **{str(status): answer for status in operation.statuses},
            **{
                str(status): {"description": why, "content": _json({"$ref": _SCHEMA_PATH.format(name="Error")})}
                for status, why in sorted(failures.items())
            },
        },
    }
    return {name: value for name, value in written.items() if value}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": _schema(schema)}}


def _schema(given: Any) -> Any:
    """Replace every type in a JSON schema by a reference to its component."""
    if isinstance(given, type):
        return {"$ref": _SCHEMA_PATH.format(name=given.__name__)}
    if isinstance(given, Mapping):
        return {name: _schema(value) for name, value in given.items()}
    return [_schema(one) for one in given] if isinstance(given, Sequence) and not isinstance(given, str) else given


def _types_in(given: Any) -> list[type[msgspec.Struct]]:
    """List all types in a JSON schema."""
    if isinstance(given, type):
        return [given]
    inside = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else ()
    return [one for part in inside for one in _types_in(part)]

"""Defines the operations on one session (`protocol`): the methods of `Session` and `AsyncSession`."""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, Unpack
from urllib.parse import quote

import msgspec

from tokencache.backoff import delays
from tokencache.client.access import Access
from tokencache.client.errors import AnswerError, NotFoundError, SealedError, WaitTimeoutError
from tokencache.client.protocol import BASE, Pause, Request, Steps, call, call_for_bytes, send_delete
from tokencache.core.media import StoredMedium
from tokencache.core.strict_json import replace_surrogates
from tokencache.trajectories.lengths import ExportOptions, parameters_of
from tokencache.trajectories.values import EditedScores, RewardState, SessionState, Trajectory, TurnChange

_FIRST_POLL, _LONGEST_POLL = 0.02, 1.0
"""Seconds between two requests for the state of a session: the first and the longest pause."""

_LONGEST_SCORING = 3600.0
"""Seconds for which an engine may score a session."""


class _Media(msgspec.Struct):
    media: list[StoredMedium]


class _Changes(msgspec.Struct):
    changes: list[TurnChange]


def path_of(name: str) -> str:
    """Return the path of a session in the API."""
    return f"{BASE}/sessions/{quote(name, safe='')}"


def state(session: Access) -> Steps[SessionState]:
    """Return the state of the session: turns, open calls, incidents, reward, labels."""
    return (yield from call(Request("GET", path_of(session.id)), SessionState))


def wait(session: Access, *, turns: int = 0, finished: bool = False, sealed: bool = False, timeout: float = 60.0) -> Steps[SessionState]:
    """Wait until no call is open and the other conditions hold. Returns the state of the session.

    With a condition, the session need not have begun yet.

    Args:
        session: the session.
        turns: at least this many turns are recorded.
        finished: the session is finished or sealed.
        sealed: the session is sealed.
        timeout: how long to wait, in seconds.

    Raises:
        WaitTimeoutError: the conditions did not hold in time.
        SealedError: the session is sealed with fewer turns, so more cannot come.
        NotFoundError: there is no such session, and no other condition was given.
    """
    deadline, polls = time.monotonic() + timeout, delays(_FIRST_POLL, _LONGEST_POLL)
    while True:
        try:
            now = yield from state(session)
        except NotFoundError:
            if not turns and not finished and not sealed:
                raise
            now = None
        if now is not None and not now.open_calls:
            if now.turns >= turns and (now.sealed or not sealed) and (is_over(now) or not finished):
                return now
            if now.sealed and now.turns < turns:
                raise SealedError(f"session {session.id!r} is sealed with {now.turns} turns: {turns} cannot come any more")
        left = deadline - time.monotonic()
        if left <= 0:
            wanted = _conditions(turns, finished=finished, sealed=sealed)
            raise WaitTimeoutError(f"session {session.id!r}: waited {timeout:g} s for {wanted}; {described(now)}")
        yield Pause(min(next(polls), left))


def finish(
    session: Access,
    reward: float | None = None,
    *,
    components: Mapping[str, float] | None = None,
    turns: Mapping[str, float] | None = None,
    sequences: Mapping[str, float] | None = None,
    group: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Iterable[str] | None = None,
    failed: str | None = None,
    detail: str = "",
) -> Steps[SessionState]:
    """Declare the rollout finished: the session accepts no new calls. Calls in flight end normally. Returns its state.

    Finishing again has no effect, except that a reward that is given again is stored again, and that an outcome may still be given where
    none was, until the session is sealed. The labels replace those stored before; `None` leaves them as they are.

    Args:
        session: the session.
        reward: the reward of the whole rollout. Without any reward, those stored before stay.
        components: named parts of the reward.
        turns: rewards of turns, by turn id.
        sequences: rewards of sequences, by sequence id.
        group: the name that the rollouts of one prompt share.
        metadata: a JSON object of at most 16 KiB.
        tags: at most 32 strings.
        failed: what failed, if the reward says nothing about the policy: `engine`, `harness`, `sandbox`, `timeout`, `budget`, `canceled`,
            `store`, or a word of your own (a lower-case letter and at most 31 of `a-z 0-9 _ -`). `ok`: nothing failed, whatever the proxy
            saw. `None`: the proxy says what it saw (docs/lifecycle.md).
        detail: the failure in words; cut after 2,000 characters.

    Raises:
        NotFoundError: there is no such session.
        OutcomeError: the session has another outcome, or is sealed without this one; nothing was changed.
        RefusedError: a reward, a label or the outcome is invalid; nothing was changed.
    """
    members = {**_reward(reward, components, turns, sequences), **_labels(group, metadata, tags)}
    members |= ({} if failed is None else {"failed": failed}) | ({"detail": replace_surrogates(detail)} if detail else {})
    return (yield from call(Request("POST", f"{path_of(session.id)}/finish", body=written(members)), SessionState))


def set_reward(
    session: Access,
    reward: float | None,
    *,
    components: Mapping[str, float] | None = None,
    turns: Mapping[str, float] | None = None,
    sequences: Mapping[str, float] | None = None,
) -> Steps[RewardState]:
    """Store the reward of the session, in any of its states. It replaces the one before as a whole; the server keeps a history.

    `finish` documents the arguments and errors.
    """
    body = written({"reward": None, **_reward(reward, components, turns, sequences)})
    return (yield from call(Request("PUT", f"{path_of(session.id)}/reward", body=body), RewardState))


def rewards(session: Access) -> Steps[RewardState]:
    """Return the reward of the session and its history."""
    return (yield from call(Request("GET", f"{path_of(session.id)}/reward"), RewardState))


def changes(session: Access) -> Steps[list[TurnChange]]:
    """Return for each turn what changed in its request, in the order in which the turns were recorded."""
    return (yield from call(Request("GET", f"{path_of(session.id)}/changes"), _Changes)).changes


def score(
    session: Access, edits: Iterable[Mapping[str, Any]] = (), *, turns: Iterable[str] = (), top: int = 0, score: bool = True
) -> Steps[EditedScores]:
    """Score the recorded replies after edited messages, such as with a hint (docs/scoring.md). Every sampled reply keeps its exact ids.

    Args:
        session: the session.
        edits: what changes: `{"at": 1, "insert": [message, …]}` puts messages before the one at this place, and `{"at": 1, "replace":
            [message, …]}` in its place. Places are those of each turn's recorded messages: 0 is the first, -1 the last. Without `at`,
            messages are inserted directly before the reply.
        turns: the ids of the turns; empty for all. Each has its whole prompt, so name those of a long session.
        top: number of the likeliest tokens to return at each place, at most 20.
        score: whether the session's engine scores them. Otherwise only the edited prompts are returned, for an engine of yours.

    Raises:
        RefusedError: an edit is invalid, or no turn has its place; the message names it.
        AnswerError: the engine failed, or its weights changed meanwhile; nothing was scored.
    """
    body = written({"edits": list(edits), "turns": list(turns), "top": top, "score": score})
    return (yield from call(Request("POST", f"{path_of(session.id)}/score", body=body, wait=_LONGEST_SCORING), EditedScores))


def label(
    session: Access, *, group: str | None = None, metadata: Mapping[str, Any] | None = None, tags: Iterable[str] | None = None
) -> Steps[SessionState]:
    """Replace labels of the session, in any of its states. `None` leaves a label as it is; `finish` documents them."""
    body = written(_labels(group, metadata, tags))
    return (yield from call(Request("PATCH", path_of(session.id), body=body), SessionState))


def seal(session: Access, *, force: bool = False) -> Steps[SessionState]:
    """Seal the session: what is recorded does not change any more. Sealing again has no effect. Returns its state.

    Args:
        session: the session.
        force: seal it even if it is not finished or has calls in flight. An incident then reports what was cut, and `complete` is false.

    Raises:
        UnfinishedError: the session is not finished, or has calls in flight.
    """
    parameters = {"force": "true"} if force else {}
    return (yield from call(Request("POST", f"{path_of(session.id)}/seal", parameters), SessionState))


def trajectory(session: Access, *, drift: str = "", **lengths: Unpack[ExportOptions]) -> Steps[Trajectory]:
    """Fetch the current trajectory of the session. `fetch` documents the arguments."""
    return (yield from call(_trajectory(session.id, "native", drift, lengths), Trajectory))


def fetch(session: Access, format: str = "native", *, drift: str = "", **lengths: Unpack[ExportOptions]) -> Steps[Any]:  # noqa: A002 - the name of the query parameter
    """Fetch the current trajectory: a `Trajectory` if the format is `native`, else the JSON object of the format.

    `drift` selects the turns whose drift is measured first (docs/drift.md): `off`, `sequences` or `turns`. `""` uses the default of
    the proxy: `sequences` for `native`, which costs the engine one rendering for each sequence, and `off` for other formats.

    `lengths` limits the length of sequences in tokens: `max_length` (of the whole sequence), `max_prompt_length` (before its first
    sampled token) and `max_response_length` (from there on). With a limit, `overlong` is required: it is `drop` to leave longer
    sequences out, `cut` to end them after the last whole turn that fits, or `mask` to keep them and train nothing of them.
    `figures.overlong` reports what was left out or masked (docs/formats.md).

    Raises:
        RefusedError: the format is unknown (the message lists all formats), or a limit is wrong.
    """
    return (yield from call(_trajectory(session.id, format, drift, lengths), Trajectory if format == "native" else dict))


def fetch_json(session: Access, format: str = "native", *, drift: str = "", **lengths: Unpack[ExportOptions]) -> Steps[bytes]:  # noqa: A002 - the name of the query parameter
    """Fetch the current trajectory as the JSON text that the proxy wrote, with every digit and member.

    `fetch` documents the arguments.
    """
    return bytes((yield from call(_trajectory(session.id, format, drift, lengths), msgspec.Raw)))


def media(session: Access) -> Steps[list[StoredMedium]]:
    """List the images and other media of the session whose bytes are stored, in the order in which they were stored (docs/images.md)."""
    return (yield from call(Request("GET", f"{path_of(session.id)}/media"), _Media)).media


def medium(session: Access, sha256: str) -> Steps[bytes]:
    """Fetch the bytes of an image or another medium, by their hexadecimal SHA-256 (`PlacedMedia.sha256`).

    Raises:
        NotFoundError: there is no such session or medium, or its bytes were not kept.
        AnswerError: the bytes that arrived have another SHA-256.
    """
    content = yield from call_for_bytes(Request("GET", f"{path_of(session.id)}/media/{quote(sha256, safe='')}"))
    if hashlib.sha256(content).hexdigest() != sha256:
        raise AnswerError(f"session {session.id!r}: the bytes that arrived for medium {sha256} have another SHA-256")
    return content


def delete(session: Access, *, reuse: bool = False) -> Steps[None]:
    """Delete the session with all its tokens, whatever its state.

    A late call does not create it again for a while. With `reuse` it may: the name is usable at once, also after an earlier deletion.
    """
    yield from send_delete(path_of(session.id), {"reuse": "true"} if reuse else {})


def revoke(session: Access) -> Steps[None]:
    """Revoke the session's key: from now on the proxy returns 401 to it. The recorded turns stay.

    Raises:
        ValueError: the session was opened by its name, so no key was registered.
        NotFoundError: the key was revoked already.
    """
    if not session.key_id:
        raise ValueError(f"session {session.id!r} was opened by its name: there is no key to revoke")
    yield from send_delete(f"{BASE}/keys/{session.key_id}")


def is_over(now: SessionState) -> bool:
    """Whether a session is finished or sealed."""
    return now.sealed or now.state in {"finished", "sealed"}


def described(now: SessionState | None) -> str:
    """Describe the state of a session in words."""
    if now is None:
        return "there is no such session yet"
    calls = ", ".join(one.call for one in now.open_calls)
    stage = "is sealed" if now.sealed else "is finished" if is_over(now) else "is not finished"
    return f"it has {now.turns} turns and {f'open calls: {calls}' if calls else 'no open call'}, and {stage}"


def _conditions(turns: int, *, finished: bool, sealed: bool) -> str:
    given = {f"at least {turns} turns": bool(turns), "its end (session.finish)": finished, "the seal": sealed}
    return " and ".join(["no open call", *(name for name, wanted in given.items() if wanted)])


def _trajectory(name: str, form: str, drift: str, lengths: ExportOptions) -> Request:
    parameters = {"format": form} | ({"drift": drift} if drift else {}) | parameters_of(lengths)
    return Request("GET", f"{path_of(name)}/trajectories", parameters)


def _reward(
    reward: float | None, components: Mapping[str, float] | None, turns: Mapping[str, float] | None, sequences: Mapping[str, float] | None
) -> dict[str, Any]:
    """Write the members of a reward that are given, numbers of NumPy and torch included."""
    parts = {"components": components, "turns": turns, "sequences": sequences}
    members: dict[str, Any] = {} if reward is None else {"reward": _finite("reward", reward)}
    for name, values in parts.items():
        if values is not None:
            members[name] = {key: _finite(f"{name}[{key!r}]", value) for key, value in values.items()}
    return members


def _finite(name: str, value: float) -> float:
    """Check a reward. JSON has no NaN and no infinity. Raises `ValueError` if it is not finite."""
    if not math.isfinite(value):
        raise ValueError(f"{name}: {value} is not a finite number")
    return float(value)


def _labels(group: str | None, metadata: Mapping[str, Any] | None, tags: Iterable[str] | None) -> dict[str, Any]:
    """Write the labels that are given."""
    given = {"group": group, "metadata": metadata, "tags": None if tags is None else listed(tags)}
    return {name: value for name, value in given.items() if value is not None}


def listed(tags: Iterable[str]) -> list[str]:
    """Return tags as a list. Raises `TypeError` if they are one string, whose characters would become tags."""
    if isinstance(tags, str):
        raise TypeError(f"tags: {tags!r} is a string, not a collection of tags. For one tag write [{tags!r}]")
    return list(tags)


def written(members: Mapping[str, Any]) -> bytes:
    """Write the body of a request.

    Raises:
        ValueError: it has a number that is not finite, which JSON cannot express.
        TypeError: it has a value that is not JSON.
    """
    return json.dumps(members, allow_nan=False).encode()

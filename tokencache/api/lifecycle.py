"""Handlers of the trainer's API that create, label, reward, finish, seal and delete sessions, and that register API keys."""

import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tokencache.api.admission import AdmissionWait
from tokencache.api.http import flag, json_response, not_found, number, read_body
from tokencache.api.queue import SessionQueue
from tokencache.api.reader import no_session, owed_incidents, state_object
from tokencache.api.requests import Finish, NewReward
from tokencache.core.fork import turns_to_share
from tokencache.core.lineage import lineages
from tokencache.core.session import LabelChanges, NewFork, NewSession, Reward, SessionStage
from tokencache.core.turn import Turn
from tokencache.dialects.chat.sampling import bending
from tokencache.dialects.chat.vocabulary import check_policy
from tokencache.engine.admission import MOST_WAIT_SECONDS
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.proxy.dedup.lost_calls import HEARTBEAT_SECONDS
from tokencache.proxy.finishing import finish, offer
from tokencache.proxy.harness_profile import HarnessProfiles
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.request_body import whole_body_of
from tokencache.proxy.sessions import hash_key
from tokencache.session_url import REGISTERED_KEY, check_name, session_url
from tokencache.store.base import Binding, SealOutcome, SessionGoneError, SessionInfo
from tokencache.store.clock import RECORD_CLOCK

_RETRY_SECONDS = 5
_MOST_NAMED = 8

T = TypeVar("T")


class LifecycleRoutes:
    """The handlers. `pool` are the engines. With `max_ready`, no sessions are created while consumers could take so many; 0: always.

    `admission` decides when a session may be created; `None`: always. `public_url` is `--public-url`.
    """

    def __init__(
        self,
        ledger: Ledger,
        profiles: HarnessProfiles,
        queue: SessionQueue,
        pool: Pool,
        *,
        max_ready: int,
        admission: AdmissionWait | None,
        public_url: str,
    ) -> None:
        self._ledger, self._store, self._profiles, self._queue = ledger, ledger.store, profiles, queue
        self._pool, self._max_ready, self._admission, self._public_url = pool, max_ready, admission, public_url

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Define a session."""
        asked = await read_body(request, NewSession)
        name, created = await self._define(asked, request)
        state = await self._state(await self._existing(name)) | self._urls(name) | self._warnings(asked)
        return json_response(state, status=HTTPStatus.CREATED if created else HTTPStatus.OK)

    async def register_key(self, request: web.Request) -> web.StreamResponse:
        """Define a session, and register a key for it."""
        asked = await read_body(request, NewSession)
        name, _ = await self._define(asked, request)
        return json_response(await self._key(name, asked), status=HTTPStatus.CREATED)

    async def fork(self, request: web.Request) -> web.StreamResponse:
        """Fork a session after a turn, and register a key for the fork."""
        source = await self._existing(check_name(request.match_info["session"]))
        asked = await read_body(request, NewFork)
        try:
            turns = turns_to_share(await self._store.turns(source.id), asked.turn)
        except KeyError:
            raise not_found(f"session {source.id!r} has no turn {asked.turn[:80]!r}") from None
        wanted = asked.of(source.settings)
        name, _ = await self._define(wanted, request)
        try:
            await self._store.share(name, source.id, turns)
            await self._share_media(name, source.id, turns)
        except BaseException as error:
            await self._store.delete(name, reuse=True)  # without its turns it would be another session
            if isinstance(error, KeyError | SessionGoneError):
                raise no_session(source.id) from None
            raise
        body = {"forked_from": source.id, "turn": asked.turn, "shared": len(turns), **await self._key(name, wanted)}
        return json_response(body, status=HTTPStatus.CREATED)

    async def _share_media(self, name: str, source: str, turns: Sequence[Turn]) -> None:
        """Store the images in the prompts of shared turns with the fork, too."""
        wanted = {medium.sha256 for turn in turns for medium in turn.media}
        stored = [medium for medium in await self._store.stored_media(source) if medium.sha256 in wanted] if wanted else []
        info = await self._existing(name)
        for medium in stored:
            found = await self._store.media(source, medium.sha256)
            if found is not None:
                await self._store.put_media(name, info.epoch, medium, found[1], limit=sys.maxsize)

    async def revoke_key(self, request: web.Request) -> web.StreamResponse:
        """Remove the binding of a key."""
        name = request.match_info["key"]
        if not await self._store.unbind_key(name):
            raise not_found(f"there is no key with the id {name[:80]!r}")
        return json_response({"id": name, "revoked": True})

    async def label(self, request: web.Request) -> web.StreamResponse:
        """Change the labels of a session."""
        name = check_name(request.match_info["session"])
        changes = await read_body(request, LabelChanges, invalid=HTTPStatus.UNPROCESSABLE_ENTITY)
        if not await self._store.set_labels(name, changes):
            raise no_session(name)
        self._ledger.changed.notify()
        return json_response(await self._state(await self._existing(name)))

    async def finish(self, request: web.Request) -> web.StreamResponse:
        """Finish a session, and store what is given with it."""
        info = await self._existing(check_name(request.match_info["session"]))
        asked = await read_body(request, Finish, invalid=HTTPStatus.UNPROCESSABLE_ENTITY) if await whole_body_of(request) else Finish()
        outcome, changes = _valid(lambda: asked.outcome), _valid(lambda: asked.label_changes)
        reward = await self._checked(info, asked.new_reward)
        if outcome is not None and info.state is not SessionStage.OPEN:  # it may be refused, and then nothing else is stored
            await self._store.finish(info.id, outcome)
        if changes.given:
            await self._store.set_labels(info.id, changes)
        if reward is not None:
            await self._store.add_reward(info.id, reward)
        if not await finish(self._ledger, info, outcome):
            raise no_session(info.id)
        return json_response(await self._state(await self._existing(info.id)))

    async def seal(self, request: web.Request) -> web.StreamResponse:
        """Seal a session."""
        name, force = check_name(request.match_info["session"]), flag(request, "force")
        info = await self._existing(name) if force else None
        if info is not None:
            await offer(self._store, info)
        match await self._store.seal(name, force=force, at=RECORD_CLOCK.now()):
            case SealOutcome.MISSING:
                raise no_session(name)
            case SealOutcome.UNFINISHED:
                message = f"session {name} is not finished: finish it first (`tokencache finish {name}`), {_or_force(name)}"
                raise HarnessError(message, status=HTTPStatus.CONFLICT, kind="session_open")
            case SealOutcome.CALLS_IN_FLIGHT:
                await self._queue.lost.close(await self._existing(name))  # a repeated request then finds none of them
                message = f"session {name} has calls in flight: wait until they end, {_or_force(name)}"
                raise HarnessError(message, status=HTTPStatus.CONFLICT, kind="calls_in_flight")
        if info is not None:
            self._ledger.release(info)
        self._ledger.changed.notify()
        sealed = await self._existing(name)
        if sealed.open_calls:
            await self._store.watch(name, HEARTBEAT_SECONDS)
        return json_response(await self._state(sealed))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Delete a session."""
        name = check_name(request.match_info["session"])
        reuse = flag(request, "reuse")
        known = await self._ledger.delete(name, reuse=reuse)
        if not known and not reuse:  # with `reuse` the name only has to be free afterwards
            raise no_session(name)
        return json_response({"session": name, "deleted": known})

    async def set_reward(self, request: web.Request) -> web.StreamResponse:
        """Store a reward of a session."""
        info = await self._existing(check_name(request.match_info["session"]))
        asked = await read_body(request, NewReward, invalid=HTTPStatus.UNPROCESSABLE_ENTITY)
        reward = await self._checked(info, asked)
        assert reward is not None  # noqa: S101 - one was asked
        if not await self._store.add_reward(info.id, reward):
            raise no_session(info.id)
        self._ledger.changed.notify()
        return json_response(await self._rewards(info.id))

    async def reward(self, request: web.Request) -> web.StreamResponse:
        """Return the reward of a session, and its history."""
        info = await self._existing(check_name(request.match_info["session"]))
        return json_response(await self._rewards(info.id))

    async def _define(self, asked: NewSession, request: web.Request) -> tuple[str, bool]:
        """Create a session, or join it. Returns its name, and whether it was created.

        Raises:
            HarnessError: a setting or a label is invalid, too many sessions are ready, or the engines have no room for it.
            SessionExistsError, SettingsConflictError: it exists.
        """
        name = check_name(f"rollout-{secrets.token_hex(8)}" if asked.session is None else asked.session)
        self._profiles.leniency(asked.harness)
        try:
            check_policy(asked.sampling)
        except ValueError as error:
            raise HarnessError(f"sampling: {error}", param="sampling") from None
        labels = _valid(lambda: asked.labels)
        left = asked.settings.seconds_left(now := time.time())
        if asked.deadline is not None and asked.deadline <= now:
            message = f"`deadline` {asked.deadline:.0f} is in the past: it is a Unix time in seconds, and now is {now:.0f}"
            raise HarnessError(message, status=HTTPStatus.UNPROCESSABLE_ENTITY, param="deadline")
        await self._check_ready(name, labels.group, exist_ok=asked.exist_ok)
        if self._admission is not None:
            await self._admission.admit(name, number(request, "wait", 0, most=MOST_WAIT_SECONDS))
        if left is not None:  # before it is defined, so that a crash in between does not lose the limits
            await self._store.watch(name, left)
        return name, await self._store.define(name, asked.settings, labels, exist_ok=asked.exist_ok)

    def _warnings(self, asked: NewSession) -> dict[str, list[str]]:
        """Return what a trainer should know of a new session, as the member `warnings` of an answer; none if there is nothing."""
        bent = bending(asked.sampling) if self._pool.raw_logprobs else ""
        if not bent:
            return {}
        advice = "start it with --logprobs-mode processed_logprobs"
        return {"warnings": [f"sampling: {bent}, and the engine's log probabilities are raw, so they are not the policy's: {advice}"]}

    async def _check_ready(self, name: str, group: str, *, exist_ok: bool) -> None:
        """Check that consumers could not take too many sessions already. A group that waits for further sessions always gets them.

        Raises:
            HarnessError: they could (429).
        """
        if not self._max_ready or (exist_ok and await self._store.session(name) is not None):
            return
        if ready := await self._queue.too_many(group, self._max_ready):
            message = (
                f"{ready} finished sessions are ready and not taken, and --max-ready is {self._max_ready}: "
                "create further sessions after a consumer has taken some"
            )
            raise HarnessError(
                message, status=HTTPStatus.TOO_MANY_REQUESTS, kind="too_many_ready", headers={"Retry-After": str(_RETRY_SECONDS)}
            )

    async def _checked(self, info: SessionInfo, asked: NewReward | None) -> Reward | None:
        """Check that the turns and sequences of a reward exist. Raises `HarnessError` if one does not, or a bound is exceeded (422)."""
        if asked is None:
            return None
        reward = _valid(lambda: asked.at(RECORD_CLOCK.now()))
        if reward.turns or reward.sequences:
            turns = await self._store.turns(info.id)
            _refuse_unknown("turn", reward.turns, {turn.id for turn in turns}, info.id)
            _refuse_unknown("sequence", reward.sequences, {line[0].id for line in lineages(turns)}, info.id)
            if reward.sequences:
                reward = msgspec.structs.replace(reward, recorded=len(turns))
        return reward

    async def _key(self, name: str, asked: NewSession) -> dict[str, Any]:
        """Register a key for a session. Returns it with the settings of the session."""
        key = REGISTERED_KEY + secrets.token_urlsafe(32)
        await self._store.bind_key(hash_key(key), Binding(name))
        body = {"session": name, **msgspec.to_builtins(asked.settings), "key": key, "id": hash_key(key)}
        return body | self._urls(name) | self._warnings(asked)

    def _urls(self, name: str) -> dict[str, str]:
        """Return where harnesses reach the proxy and the session. Without `--public-url` only the client knows which URL reaches them."""
        public = self._public_url
        return {"public_url": public, "base_url": f"{session_url(public, name)}/v1"} if public else {}

    async def _rewards(self, name: str) -> dict[str, Any]:
        info = await self._existing(name)
        *history, newest = await self._store.rewards(name) or [Reward()]
        return {
            "session": name,
            **msgspec.structs.asdict(newest),
            "history": [msgspec.structs.asdict(one) for one in history],
            "count": info.rewards,
        }

    async def _existing(self, name: str) -> SessionInfo:
        """Read the state of a session. Raises `HarnessError` if there is no such session (404)."""
        info = await self._store.session(name)
        if info is None:
            raise no_session(name)
        return info

    async def _state(self, info: SessionInfo) -> dict[str, Any]:
        return state_object(info, await owed_incidents(self._ledger, info))


def _refuse_unknown(what: str, given: Mapping[str, float], known: Collection[str], session: str) -> None:
    """Refuse rewards of turns or sequences that do not exist. Raises `HarnessError` if there are some (422)."""
    unknown = [name[:80] for name in given if name not in known]
    if unknown:
        named = ", ".join(map(repr, unknown[:_MOST_NAMED]))
        message = f"session {session} has no {what} {named}; `tokencache show {session}` and its trajectories list them"
        raise HarnessError(message, status=HTTPStatus.UNPROCESSABLE_ENTITY, param=f"{what}s")


def _or_force(name: str) -> str:
    return f"or seal it by force (`tokencache seal {name} --force`, ?force=true), which marks what is cut"


def _valid(make: Callable[[], T]) -> T:
    """Make a value, and report its error to the client. Raises `HarnessError` if the value is invalid (422)."""
    try:
        return make()
    except ValueError as error:
        raise HarnessError(str(error), status=HTTPStatus.UNPROCESSABLE_ENTITY) from None

"""The blocking client: `Client`, and the `Session` and `Delivery` that it returns."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Self, Unpack

from tokencache.client import collecting, operations, session_operations, weight_operations
from tokencache.client.access import Access, access_to, members_of
from tokencache.client.collecting import FollowOptions
from tokencache.client.operations import ForkOptions, ProxyAddress, SessionOptions
from tokencache.client.transport import BlockingTransport, blocking, blocking_iterator
from tokencache.client.weight_operations import OwnUpdate, UpdateOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session(Access):
    """One rollout. Attributes for the harness: `key`, `base_url`, `headers`, `env`, `launch`. Methods for the trainer.

    A session that was not created begins with its first call. Before that, every method except `wait` and `revoke` raises
    `NotFoundError`. Methods also raise the exceptions of `Client`.
    """

    _transport: BlockingTransport = dataclasses.field(repr=False)

    state = blocking(session_operations.state)
    wait = blocking(session_operations.wait)
    finish = blocking(session_operations.finish)
    set_reward = blocking(session_operations.set_reward)
    rewards = blocking(session_operations.rewards)
    changes = blocking(session_operations.changes)
    score = blocking(session_operations.score)
    label = blocking(session_operations.label)
    seal = blocking(session_operations.seal)
    trajectory = blocking(session_operations.trajectory)
    fetch = blocking(session_operations.fetch)
    fetch_json = blocking(session_operations.fetch_json)
    media = blocking(session_operations.media)
    medium = blocking(session_operations.medium)
    delete = blocking(session_operations.delete)
    revoke = blocking(session_operations.revoke)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery(collecting.DeliveryData):
    """Sessions that a consumer took from the queue, with their trajectories."""

    _transport: BlockingTransport = dataclasses.field(repr=False)

    acknowledge = blocking(collecting.acknowledge)
    release = blocking(collecting.release)
    extend = blocking(collecting.extend)


class Client(ProxyAddress):
    """A connection to a proxy, for a trainer. Several threads may use it.

    Every method that sends a request raises `UnreachableError` if the proxy does not respond, `WrongServerError` if another program
    responds (for example the engine), `UnauthorizedError` without the right key, and another `AnswerError` if the proxy refuses.
    Requests that may be repeated are sent up to four times.

    Args:
        url: the base URL of the proxy, without `/v1`.
        admin_key: the key that the proxy was started with (`--admin-key`).
        timeout: how long to wait for one response, in seconds.
        adapters: a directory with harness adapters of your own.

    Raises:
        InvalidUrlError: the URL has no scheme or no host, or it ends with `/v1` or is the URL of a session.
    """

    def __init__(self, url: str, admin_key: str | None = None, *, timeout: float = 60.0, adapters: Path | None = None) -> None:
        super().__init__(url, adapters)
        self._transport = BlockingTransport(self.url, admin_key, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._transport.http.close()

    def create(self, name: str | None = None, **options: Unpack[SessionOptions]) -> Session:
        """Define a session, by default one with a random name, and register an API key for it.

        Args:
            name: the session's name: 1 to 200 of `A-Z a-z 0-9 . _ : @ + = -`.
            harness: the adapter (`tokencache harnesses`) whose rules apply, and for which `env` and `launch` are prepared.
            model: the model that the harness requests. Default: the served one. Only used with `harness`.
            models: maps names (shell patterns) that the harness may use to the model that is served.
            sampling: sampling parameters that override those of the harness.
            tenant: the owner of the rollout. Tenants do not share the engine's prefix cache (docs/threat-model.md).
            history: `follow` omits the thinking of earlier replies where the chat template does; `supply` keeps it (docs/templates.md).
                Default: that of the proxy.
            budget: limits after which the session ends (docs/budgets.md). For limits that it does not set, those of the proxy apply.
            deadline: when the session is finished at the latest, as Unix time: `time.time() + 600`. The outcome is then `timeout`.
            silent_for: finish it, with the same outcome, once no call has begun or ended for so many seconds: its harness is lost.
            config_dir: where to write the configuration of the harness: a new directory, or one from an earlier call. Without it,
                variables that name it are left out.
            group, metadata, tags: labels of the session; see `Session.finish`.
            exist_ok: accept a session that exists, if it has the same settings or none are given.
            wait: for how many seconds to wait while consumers could take too many sessions already (`--max-ready`), or the engines have no
                room for the session (`--admission`).

        Raises:
            AdapterError: there is no such adapter, it needs `config_dir`, or several models are served and none is named
                (`tokencache.adapters.load`).
            RefusedError: the name, a sampling parameter or a label is invalid.
            ExistsError: the session exists; with `exist_ok`, `OtherSettingsError`: it has other settings.
            TooManyReadyError: consumers could take too many sessions already.
            NoRoomError: the KV caches of the engines have no room for it.
        """
        return self._session(self._transport.run(operations.create(self, name, **options)))

    def fork(self, session: str, turn: str, name: str | None = None, **options: Unpack[ForkOptions]) -> Session:
        """Fork a session after a turn: a harness that replays the history up to there goes on with its exact tokens, on its own.

        The fork shares these tokens. They have mask 0 in its trajectory; only its own turns are trained. The session may be in any state,
        and may be deleted before its forks. Its settings hold for the fork, too, but for `deadline` and `silent_for`.

        Args:
            session: the session to fork.
            turn: the id of the turn after which the fork begins (`TurnSpan.turn`).
            name: the fork's name. Default: a random one.
            deadline, silent_for: as in `create`.
            group, metadata, tags: labels of the fork; see `Session.finish`.

        Raises:
            NotFoundError: there is no such session or turn.
            ExistsError: a session with this name exists.
        """
        return self._session(self._transport.run(operations.fork(self, session, turn, name, **options)))

    def session(self, name: str) -> Session:
        """Open a session by its name, whether or not it has begun. Its key contains that name, `tcs-NAME`. Sends no request."""
        return self._session(access_to(self.url, name))

    def follow(self, consumer: str, **options: Unpack[FollowOptions]) -> Iterator[Delivery]:
        """Take finished sessions from the queue of the proxy, sealed, in deliveries of one session or of one whole group.

        A delivery belongs to this consumer until it is acknowledged or released, or its lease ends. If the consumer fails, another one
        with the same name gets its deliveries at once; any other gets them when their lease ends. Sessions are delivered again only in
        these cases.

        If the proxy stops responding or its store fails, requests are repeated for five minutes, or for `timeout` if that is less. So the
        proxy may be restarted while a trainer runs.

        Args:
            consumer: the name of this consumer. Consumers that run at the same time have different names; a restarted one keeps its name.
            group_size: the number of sessions of one group in a delivery. 1: one session, whatever its group.
            min_group, group_timeout: deliver a group with at least `min_group` sessions once so many seconds have passed since the first of
                them was finished (docs/lifecycle.md). Default: it waits until it is whole.
            format: of the trajectories; see `Session.fetch`. `max_length`, `max_prompt_length`, `max_response_length` and `overlong`
                limit their length.
            rewarded: take only sessions with a reward, and those that were finished as failed, which nobody rewards.
            lease: for how many seconds a delivery belongs to this consumer (600). Taking the next delivery extends the leases of those
                that are not acknowledged yet.
            timeout: stop after so many seconds without a delivery; `None`: never. A warning in the log names the groups that wait.
            group, tag, harness: take only sessions that have them.
            model: take only sessions that called it, and only its sequences of them.
            max_lag: take only sessions none of whose sampled tokens lags more than that many policy versions behind the one announced
                last. Sessions that lag more, or whose lag is not known, stay in the queue; a warning in the log counts them.

        Raises:
            UnreachableError: there is no proxy, or the outage took too long.
            RefusedError: an argument is invalid.
        """
        for taken in self._transport.iterate(collecting.follow(self, consumer, **options)):
            yield Delivery(**members_of(taken), _transport=self._transport)

    @contextlib.contextmanager
    def update_weights(self, version: int | str, **options: Unpack[UpdateOptions]) -> Iterator[OwnUpdate]:
        """Replace the weights of the engines: new calls wait and the engines are paused while the context is open.

        In the context, the trainer sends the weights as it always does. At its end the engines go on with the new version. If the
        context raises, the engines go on too, and their version is unknown. If this process dies, the proxy does that when the timeout
        has passed.

            with client.update_weights(step):
                sync_weights_to_the_engines()

        Args:
            version: the version of the new weights, a number or a name.
            mode: what happens to replies under way (docs/weights.md). `abort`: they are cut, and continued with the new weights. `keep`:
                they are frozen. `wait`: they end first. `none`: the engines are not paused; the trainer does that itself.
            clear_cache: whether the pause empties the engines' prefix caches, and computes frozen replies' keys and values again.
            engines: the base URLs of the engines; empty for all.
            owner: who updates the weights. While an owner is updating, others are refused. An owner that begins again replaces its own
                update, so give a name if a restarted trainer shall not wait for the timeout. Default: a new name for each update.
            timeout: seconds after which the proxy ends the update by itself. The version is then unknown.

        Raises:
            ValueError: the version cannot be used.
            WeightsConflictError: another owner is updating the weights; at the end: the timeout has passed.
            EnginePauseError: an engine cannot be paused (it needs `VLLM_SERVER_DEV_MODE=1`). The others go on.
            NotFoundError: there is no such engine.
        """
        update = weight_operations.planned(version, options)
        try:
            self._transport.run(weight_operations.begin(self, update))
            yield update
            self._transport.run(weight_operations.finish(self, update))
        except BaseException as error:
            self._transport.run(weight_operations.cancel(self, update, error))
            raise

    weights = blocking(weight_operations.weights)
    set_weights = blocking(weight_operations.set_weights)
    sessions = blocking(operations.sessions)
    page = blocking(operations.page)
    runs = blocking(operations.runs)
    report = blocking(operations.report)
    iterate = blocking_iterator(collecting.iterate)
    as_completed = blocking_iterator(collecting.as_completed)
    queue = blocking(collecting.queue)
    engines = blocking(operations.engines)
    capacity = blocking(operations.capacity)
    conditions = blocking(operations.conditions)
    add_engine = blocking(operations.add_engine)
    drain_engine = blocking(operations.drain_engine)
    remove_engine = blocking(operations.remove_engine)

    def _session(self, access: Access) -> Session:
        return Session(**members_of(access), _transport=self._transport)

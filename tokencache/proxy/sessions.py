"""Finds the session that a request belongs to (`SessionFinder`), and its settings (`SettingsCache`).

Several sources can name the session. Some harnesses let the user set only a base URL or an API key, so each of these is enough. In order of
precedence:

1. an API key that the trainer registered (`tck-…`): it overrides everything else, and an unknown key gets a 401;
2. the path: `/s/<session>/v1/…`, or NeMo Gym's `/ng-rollout/<session>/v1/…` (`session_url`);
3. the header `X-Tokencache-Session` (its name can be configured);
4. an API key `tcs-<session>`;
5. a header or a member of the body that the operator listed (`--session-from`, `SessionSources`).

After the session, a path may name the harness: `/s/<session>/h/<harness>/v1/…` (with a key `/h/<harness>/v1/…`). The harness determines
which rules apply (`harness_profile`). A key may be in any header or query parameter in which clients of a dialect send keys
(`dialects.registry`).

A request without a session is relayed unchanged. Ids that clients send by default name a session only if the operator lists them, because
the proxy cannot know whether such an id belongs to a single rollout. NeMo Gym sends these (nemo-gym 0.7.0):
`conversation_params.conversation_id` in the body (`vllm_model` with `forward_session_id_as_conversation_id`,
`responses_api_models/vllm_model/app.py`), `x-session-id` (`responses_api_agents/miniswe_sandboxed_agent`,
`terminus_2_sandboxed_agent`, `verifiers_agent`) and `x-switchyard-session-id` (`responses_api_models/switchyard_model/app.py`).
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple, Self
from urllib.parse import parse_qsl, urlencode

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from tokencache.core.rules import Leniency
from tokencache.core.session import Labels, SessionSettings
from tokencache.dialects.json_io import fields_of
from tokencache.dialects.registry import credential_parameters, keys_in
from tokencache.errors import HarnessError
from tokencache.net import check_header_name
from tokencache.proxy.harness_profile import HEADER as HARNESS_HEADER
from tokencache.recent import Expiring, Recent
from tokencache.request_memory import Holding
from tokencache.session_url import REGISTERED_KEY, SESSION_KEY, NamedPath, check_name
from tokencache.store.base import Binding, SettingsChangedError, SettingsConflictError, Store, StoreError

log = logging.getLogger(__name__)

REMEMBER_KEY_SECONDS = 3600.0
"""How long after its last use a registered key is accepted while the store fails."""
_MOST_KEYS = _MOST_SESSIONS = 65_536


class Origin(msgspec.Struct, frozen=True):
    """The session of a request, and what else its path, headers and key say.

    Attributes:
        session: the session's name; `None` if there is none.
        path: the path at the engine, with its query.
        own_key: whether the API key is one of the proxy's.
        harness: the harness that the request names; `""` if none.
        old_settings: settings that an older version stored with the request's key. They count only if the session has none.
    """

    session: str | None
    path: str
    own_key: bool = False
    harness: str = ""
    old_settings: SessionSettings = SessionSettings()


class SessionRequest(msgspec.Struct, frozen=True):
    """A request within a session.

    Attributes:
        request: the request.
        session: the session's name.
        origin: where the session was named, and the path at the engine.
        settings: the settings of the session, as far as this process knows.
        route: its path without session, harness and query, in the spelling in which it is served (`session_url.spellings`).
        path: the path at the engine, with the query, of a route that the proxy knows.
        headers: the headers for the engine.
        harness: name of the harness, `""` if unknown.
        leniency: the rules that apply to the harness.
        holding: what the request holds in memory.
        began: when it arrived, as Unix time in seconds.
    """

    request: web.Request
    session: str
    origin: Origin
    settings: SessionSettings
    route: str
    path: str
    headers: CIMultiDict[str]
    harness: str
    leniency: Leniency
    holding: Holding
    began: float


def hash_key(key: str) -> str:
    """Hash an API key for storage (SHA-256, 64 hexadecimal digits), so that the store contains no usable key.

    A key is looked up by this hash and never compared directly. So the time of a look-up does not show how much of a guessed key is right.
    The hash is also the public id of the key.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class SessionInBody(NamedTuple):
    """The session that a body names (`None` if it names none), and the body without all listed members."""

    session: str | None
    rest: bytes


class SessionSources(NamedTuple):
    """The operator's list of headers and members of the body that name the session (`--session-from`).

        --session-from header:X-Session-ID,body:conversation_params.conversation_id

    They count only if path, session header and API key name no session. Within a session no listed header or member is sent to the engine:
    vLLM would ignore it, but a strict engine refuses it. Each entry of `members` is a path of names.
    """

    headers: tuple[str, ...] = ()
    members: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def read(cls, listed: Sequence[str]) -> Self:
        """Parse a list of `header:NAME`, `body:NAME` and `body:NAME.NAME`.

        Raises:
            ValueError: an entry has another form.
        """
        headers, members = list[str](), list[tuple[str, ...]]()
        for entry in listed:
            kind, _, name = entry.partition(":")
            path = tuple(name.split("."))
            if kind == "header" and name:
                headers.append(check_header_name(name))
            elif kind == "body" and all(path):
                members.append(path)
            else:
                raise ValueError(f"{entry!r} is not a source of session names: write header:NAME, body:MEMBER or body:MEMBER.MEMBER")
        return cls(tuple(headers), tuple(members))

    def in_headers(self, headers: Mapping[str, str]) -> str | None:
        """Return the value of the first listed header in a request; `None` if there is none."""
        return next((headers[name] for name in self.headers if headers.get(name)), None)

    def in_body(self, body: bytes) -> SessionInBody:
        """Remove the listed members from a body; the first one that is found names the session.

        Raises:
            HarnessError: a listed member is not a string.
        """
        found: str | None = None
        for path in self.members:
            if b'"%s"' % path[-1].encode() not in body:
                continue
            try:
                fields = fields_of(body)
            except HarnessError:
                return SessionInBody(found, body)  # not a JSON object: the route that serves the request reports it
            name = _remove(fields, path)
            if name is None:
                continue
            body = msgspec.json.encode(fields)
            found = found or name
        return SessionInBody(found or None, body)


def _remove(fields: dict[str, msgspec.Raw], path: tuple[str, ...]) -> str | None:
    """Remove the member at a path, and every object on the path that becomes empty; return the member's value."""
    name, *rest = path
    raw = fields.get(name)
    if raw is None:
        return None
    if rest:
        try:
            inner = fields_of(bytes(raw))
        except HarnessError:
            return None  # not an object
        value = _remove(inner, tuple(rest))
        if value is not None and inner:
            fields[name] = msgspec.Raw(msgspec.json.encode(inner))
        elif value is not None:
            del fields[name]
        return value
    try:
        value = msgspec.json.decode(raw, type=str | None)
    except msgspec.ValidationError:
        raise HarnessError(f"{name!r} names the session here and must be a string", param=name) from None
    del fields[name]
    return value or ""


class SessionFinder:
    """Finds the session of a request.

    `header` is the name of the session header. `sources` are the operator's own. With `registered_only`, every request without a registered
    key is refused, even if it would only be relayed to the engine.
    """

    def __init__(self, store: Store, *, header: str, sources: SessionSources, registered_only: bool = False) -> None:
        self._store = store
        self._header = header
        self.sources = sources
        self._registered_only = registered_only
        self._used: Expiring[str, Binding] = Expiring(REMEMBER_KEY_SECONDS, time.monotonic, most=_MOST_KEYS)

    async def find(self, named: NamedPath, headers: Mapping[str, str], in_body: str | None = None) -> Origin:
        """Find the session of a request.

        Args:
            named: its path.
            headers: the request's headers.
            in_body: the session that its body names (`SessionSources.in_body`).

        Raises:
            HarnessError: the name is invalid, or two keys decide (400), or the registered key is unknown or missing (401).
            StoreError: the store does not answer, and the registered key was not used here in the last hour.
        """
        harness = named.harness
        in_query, path = _key_of_query(named.rest) if "?" in named.rest else ("", named.rest)
        key, another = _key(headers, in_query)
        if key.startswith(REGISTERED_KEY):
            _refuse_two(another)
            found = await self._binding(hash_key(key))
            if found is None:
                raise HarnessError("unknown API key", status=HTTPStatus.UNAUTHORIZED, kind="authentication_error")
            return Origin(found.session, path, True, harness or headers.get(HARNESS_HEADER, ""), found.settings)
        if self._registered_only:
            raise HarnessError("this server accepts registered API keys only", status=HTTPStatus.UNAUTHORIZED, kind="authentication_error")
        in_key = key[len(SESSION_KEY) :] if key.startswith(SESSION_KEY) else None
        session = named.session if named.session is not None else headers.get(self._header)
        if session is None and in_key is not None:
            _refuse_two(another)
            session = in_key
        if session is None:
            session = self.sources.in_headers(headers) or in_body
        if session is None:
            return Origin(None, named.raw)
        return Origin(check_name(session), path, in_key is not None, harness or headers.get(HARNESS_HEADER, ""))

    async def _binding(self, key: str) -> Binding | None:
        """Return what a registered key selects. While the store fails, that is what it was at the key's last use."""
        try:
            found = await self._store.binding_of_key(key)
        except StoreError:
            found = self._used.get(key)
            if found is None:
                raise
            return found
        if found is None:
            self._used.pop(key, None)
        else:
            self._used[key] = found
        return found


class SettingsCache:
    """The settings of sessions, as far as this process knows them.

    The settings belong to the session (`core.session.SessionSettings`). A call is served by the settings that this process knows, usually
    none, and `Store.begin` compares their digest with that of the session's. If they differ, nothing has begun: the true settings are
    cached, and the call is served again by them. So a session without settings costs no further round trip, and one with settings costs
    one in each process.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: Recent[str, SessionSettings] = Recent(_MOST_SESSIONS)

    def of(self, session: str, origin: Origin) -> SessionSettings:
        """Return the settings by which a call of a session is served first."""
        return self._known.get(session) or origin.old_settings

    async def learn(self, session: str, origin: Origin, true: SessionSettings) -> None:
        """Note the settings of a session, which the store has reported.

        If it has none, and an older version stored settings with the key that the call used, these become the session's.

        Raises:
            StoreError: the store failed.
        """
        if not true and origin.old_settings:
            with contextlib.suppress(SettingsConflictError):  # another call was faster: the next attempt learns what it defined
                await self._store.define(session, origin.old_settings, Labels(), adopt=True)
            true = origin.old_settings
        if true:
            self._known[session] = true
        else:
            self._known.pop(session, None)

    async def check(self, session: str, used: SessionSettings) -> None:
        """Check the settings by which a request is served that begins no call. If the store fails, those that this process knows hold.

        Raises:
            SettingsChangedError: the session has others.
        """
        try:
            true = await self._store.settings(session)
        except StoreError as why:
            log.warning("session %s: its settings cannot be read: %s", session, why)
            return
        if true is not None and true != used:
            raise SettingsChangedError(true)


def _key_of_query(path: str) -> tuple[str, str]:
    """Remove one of the proxy's keys from a path's query, so that the engine does not log it."""
    route, _, query = path.partition("?")
    names = credential_parameters()
    members = parse_qsl(query, keep_blank_values=True)
    key = next((value for name, value in members if name in names and value.startswith((REGISTERED_KEY, SESSION_KEY))), "")
    if not key:
        return "", path
    rest = urlencode([(name, value) for name, value in members if name not in names])
    return key, f"{route}?{rest}" if rest else route


def _key(headers: Mapping[str, str], in_query: str) -> tuple[str, str]:
    """Return the request's key that is one of the proxy's, preferably a registered one, and another one of its kind; `""` for none."""
    keys, found = [*keys_in(headers), in_query], ""
    for prefix in (REGISTERED_KEY, SESSION_KEY):
        for key in keys:
            if key.startswith(prefix) and key != found:
                if found:
                    return found, key
                found = key
        if found:
            break
    return found, ""


def _refuse_two(another: str) -> None:
    if another:
        raise HarnessError("two different keys name a session, such as in x-api-key and Authorization: send only one", param="session")

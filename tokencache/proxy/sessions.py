"""Sessions: which rollout does a request belong to?

In order of precedence (a closed harness offers nothing but a base URL and a key, so each of them is enough):

1. an API key that the trainer registered (`tck-…`): beats everything, unknown ones are 401;
2. the path: `/s/<session>/v1/…`, or NeMo Gym's `/ng-rollout/<session>/v1/…` (with `/training-token-capture` before the `/v1`
   or without; nemo-gym 0.7.0, `nemo_gym/rollout_correlation.py`);
3. the header `X-Tokencache-Session` (its name can be configured);
4. an API key `tcs-<session>`;
5. what the operator chose beside these (`--session-from`, `session_sources`): a header, then a member of the body.

Behind the session a path may name the harness, `/s/<session>/h/<harness>/v1/…` (with a key `/h/<harness>/v1/…`): it says
whose habits are forgiven (`habits`). A key may come in `Authorization`, `x-api-key`, `x-goog-api-key` or, as Gemini's
clients may send it, in the query (`?key=`).

No session: the request is relayed untouched. Ids that harnesses send by themselves are never used for this unless the operator
lists them.
"""

import hashlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from tokencache.core.budget import Budget
from tokencache.errors import HarnessError
from tokencache.proxy import harness_profile as habits
from tokencache.proxy.session_sources import SessionSources
from tokencache.store.base import Store

PATH, GYM, HARNESS = "/s/", "/ng-rollout/", "/h/"
_CAPTURE = "/training-token-capture"
REGISTERED, DECLARED = "tck-", "tcs-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,199}")


class Origin(NamedTuple):
    """Where a request belongs: its session (`None`: nowhere), the path to use upstream, whether its key was ours.

    `harness` is who it says it is, `""` if it does not say; `models` are the session's own names for the model, `sampling` the
    parameters that were pinned when its key was registered, `budget` the limits that were set then.
    `tenant` is whose session it is, `""` if nobody said so.
    """

    session: str | None
    path: str
    own_key: bool = False
    harness: str = ""
    models: Mapping[str, str] = MappingProxyType({})
    sampling: Mapping[str, Any] = MappingProxyType({})
    budget: Budget = Budget()
    tenant: str = ""


def check_name(name: str) -> str:
    """Return a session's name if it is one.

    Raises:
        HarnessError: it is empty, too long, or has characters that do not survive URLs, headers and logs.
    """
    if not _NAME.fullmatch(name):
        raise HarnessError(
            f"{name[:80]!r} is no session name: 1 to 200 of A-Z a-z 0-9 . _ : @ + = -, beginning with a letter or digit", param="session"
        )
    return name


def hash_key(key: str) -> str:
    """Hash an API key for storage: the store never holds one that could be used.

    A key is looked up by this hash (SHA-256) and never compared itself. So the time that takes tells nothing of how much of a key is
    right: keys that differ a little have hashes that have nothing in common. The hash is also the key's id: nobody can use it as a key.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def route_of(raw_path: str) -> str:
    """The route that a path leads to, whatever session and harness it names, without its query."""
    return _taken(HARNESS, _session_in(raw_path)[1])[1].partition("?")[0]


class SessionFinder:
    """Finds the session of a request.

    `header` is the name of the session header; `sources` are the operator's own; `registered_only` turns away every request that
    brings no registered key: the engine, too, is out of reach without one.
    """

    def __init__(self, store: Store, *, header: str, sources: SessionSources, registered_only: bool = False) -> None:
        self._store = store
        self._header = header
        self._sources = sources
        self._registered_only = registered_only

    async def find(self, raw_path: str, headers: Mapping[str, str], in_body: str | None = None) -> Origin:
        """Find where a request belongs; `raw_path` as received, with its query, `in_body` what a listed member of its body names.

        Raises:
            HarnessError: an impossible name (400), an unknown registered key or a missing one (401).
            StoreError: the store cannot be asked.
        """
        named, path = _session_in(raw_path)
        harness, path = _taken(HARNESS, path)
        asked, path = _key_of_query(path)
        key = _key(headers, asked)
        if key.startswith(REGISTERED):
            found = await self._store.binding_of_key(hash_key(key))
            if found is None:
                raise HarnessError("unknown API key", status=401, kind="authentication_error")
            speaker = found.harness or harness or headers.get(habits.HEADER, "")
            return Origin(found.session, path, True, speaker, found.models, found.sampling, found.budget, found.tenant)
        declared = key[len(DECLARED) :] if key.startswith(DECLARED) else None
        given = named if named is not None else headers.get(self._header, declared)
        if self._registered_only:
            raise HarnessError("this server takes registered API keys only", status=401, kind="authentication_error")
        if given is None:
            given = self._sources.in_headers(headers) or in_body
        if given is None:
            return Origin(None, raw_path)
        return Origin(check_name(given), path, declared is not None, harness or headers.get(habits.HEADER, ""))


def _session_in(path: str) -> tuple[str | None, str]:
    """Take the session off the head of a path, as we name it there or as NeMo Gym does."""
    named, rest = _taken(PATH, path)
    if named is None:
        named, rest = _taken(GYM, path)
        if named is not None and rest.startswith(f"{_CAPTURE}/"):
            rest = rest[len(_CAPTURE) :]
    return named, rest


def _taken(mark: str, path: str) -> tuple[str | None, str]:
    """Take `<mark><name>` off the head of a path."""
    if not path.startswith(mark):
        return None, path
    name, slash, rest = path[len(mark) :].partition("/")
    return unquote(name), slash + rest or "/"


def _key_of_query(path: str) -> tuple[str, str]:
    """Take a key of ours out of a path's query: it is not for the engine's log."""
    route, _, query = path.partition("?")
    if "key=tc" not in query:
        return "", path
    members = parse_qsl(query, keep_blank_values=True)
    key = next((value for name, value in members if name == "key"), "")
    rest = urlencode([(name, value) for name, value in members if name != "key"])
    return key, f"{route}?{rest}" if rest else route


def _key(headers: Mapping[str, str], asked: str) -> str:
    """The key of ours among those that a request brings, a registered one first; `""` if there is none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    keys = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""), headers.get("x-goog-api-key", ""), asked]
    return next((key for mark in (REGISTERED, DECLARED) for key in keys if key.startswith(mark)), "")

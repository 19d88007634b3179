"""Sessions: which rollout does a request belong to?

In order of precedence (a closed harness offers nothing but a base URL and a key, so each of them is enough):

1. an API key that the trainer registered (`tck-…`): beats everything, unknown ones are 401;
2. the path: `/s/<session>/v1/…`;
3. the header `X-Tokencache-Session` (its name can be configured);
4. an API key `tcs-<session>`.

No session: the request is relayed untouched. Ids that harnesses send by themselves are never used for this.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from tokencache.errors import HarnessError
from tokencache.store.contract import Store

PATH = "/s/"
REGISTERED, DECLARED = "tck-", "tcs-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,199}")


class Origin(NamedTuple):
    """Where a request belongs: its session (`None`: nowhere), the path to use upstream, whether its key was ours."""

    session: str | None
    path: str
    own_key: bool = False


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
    """Hash an API key for storage: the store never holds one that could be used."""
    return hashlib.sha256(key.encode()).hexdigest()


class SessionFinder:
    """Finds the session of a request.

    `header` is the name of the session header; `registered_only` turns away every session that no registered key
    stands for.
    """

    def __init__(self, store: Store, *, header: str, registered_only: bool = False) -> None:
        self._store = store
        self._header = header
        self._registered_only = registered_only

    async def find(self, raw_path: str, headers: Mapping[str, str]) -> Origin:
        """Find where a request belongs; `raw_path` as received, with its query.

        Raises:
            HarnessError: an impossible name (400), an unknown registered key or a missing one (401).
            StoreError: the store cannot be asked.
        """
        named, path = self._path(raw_path)
        key = _key(headers)
        if key.startswith(REGISTERED):
            session = await self._store.session_of_key(hash_key(key))
            if session is None:
                raise HarnessError("unknown API key", status=401, kind="authentication_error")
            return Origin(session, path, own_key=True)
        declared = key[len(DECLARED) :] if key.startswith(DECLARED) else None
        given = named if named is not None else headers.get(self._header, declared)
        if given is None:
            return Origin(None, path)
        if self._registered_only:
            raise HarnessError("this server takes sessions by registered API key only", status=401, kind="authentication_error")
        return Origin(check_name(given), path, own_key=declared is not None)

    @staticmethod
    def _path(raw_path: str) -> tuple[str | None, str]:
        if not raw_path.startswith(PATH):
            return None, raw_path
        name, slash, rest = raw_path[len(PATH) :].partition("/")
        return unquote(name), slash + rest or "/"


def _key(headers: Mapping[str, str]) -> str:
    """The key of ours among those that a request brings, a registered one first; `""` if there is none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    keys = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""), headers.get("x-goog-api-key", "")]
    return next((key for mark in (REGISTERED, DECLARED) for key in keys if key.startswith(mark)), "")

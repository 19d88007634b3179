"""Writes and parses URLs and API keys that name a session.

    http://HOST:PORT/s/<session>/v1/…               the session in the path
    http://HOST:PORT/s/<session>/h/<harness>/v1/…   the session and the harness
    tcs-<session>                                   an API key that names the session
    tck-…                                           an API key that the trainer registered

The proxy reads them (`proxy.sessions`); the Python client and the harness adapters write them.
"""

import re
from urllib.parse import quote, unquote

from tokencache.errors import HarnessError

REGISTERED_KEY, SESSION_KEY = "tck-", "tcs-"
_SESSION, _GYM, _HARNESS = "/s/", "/ng-rollout/", "/h/"
_GYM_CAPTURE = "/training-token-capture"
_PLAIN = ":@+="
"""Characters of a session's name that need no quoting in a path, besides letters, digits and `_.-~`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,199}")


def check_name(name: str) -> str:
    """Return a session's name if it is valid.

    Raises:
        HarnessError: it is empty, too long, or has characters that do not survive URLs, headers and logs.
    """
    if not _NAME.fullmatch(name):
        raise HarnessError(
            f"{name[:80]!r} is not a valid session name: use 1 to 200 of A-Z a-z 0-9 . _ : @ + = - and begin with a letter or digit",
            param="session",
        )
    return name


def session_url(proxy_url: str, session: str, harness: str = "") -> str:
    """Return the URL under which every request belongs to a session, without `/v1`; `harness` is the name of an adapter."""
    url = f"{proxy_url.rstrip('/')}{_SESSION}{quote(session, safe=_PLAIN)}"
    return f"{url}{_HARNESS}{harness}" if harness else url


def session_key(session: str) -> str:
    """Return the API key that names a session."""
    return SESSION_KEY + session


def split_session(path: str) -> tuple[str | None, str]:
    """Split the session off the beginning of a path; the session is `None` if the path names none.

    Also accepts NeMo Gym's form, `/ng-rollout/<session>/v1/…`, optionally with `/training-token-capture` before the `/v1`
    (nemo-gym 0.7.0, `nemo_gym/rollout_correlation.py`).
    """
    session, rest = _split(_SESSION, path)
    if session is None:
        session, rest = _split(_GYM, path)
        if session is not None and rest.startswith(f"{_GYM_CAPTURE}/"):
            rest = rest[len(_GYM_CAPTURE) :]
    return session, rest


def split_harness(path: str) -> tuple[str | None, str]:
    """Split the harness off the beginning of a path without a session (see `split_session`); it is `None` if the path names none."""
    return _split(_HARNESS, path)


def route_of(raw_path: str) -> str:
    """Return the route of a path: without session, harness and query."""
    return split_harness(split_session(raw_path)[1])[1].partition("?")[0]


def _split(prefix: str, path: str) -> tuple[str | None, str]:
    if not path.startswith(prefix):
        return None, path
    name, slash, rest = path[len(prefix) :].partition("/")
    return unquote(name), slash + rest or "/"

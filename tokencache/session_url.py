"""Writes and parses URLs and API keys that name a session.

    http://HOST:PORT/s/<session>/v1/…               the session in the path
    http://HOST:PORT/s/<session>/h/<harness>/v1/…   the session and the harness
    tcs-<session>                                   an API key that names the session
    tck-…                                           an API key that the trainer registered

The proxy reads them (`proxy.sessions`); the Python client and the harness adapters write them, after `check_proxy_url` has checked
the base URL that the user gave. `is_loopback` and `is_local` tell whether a host is this machine.
"""

import ipaddress
import re
from typing import Self
from urllib.parse import quote, unquote, urlsplit

import msgspec

from tokencache.errors import HarnessError

REGISTERED_KEY, SESSION_KEY = "tck-", "tcs-"
_SESSION, _GYM, _HARNESS = "/s/", "/ng-rollout/", "/h/"
_GYM_CAPTURE = "/training-token-capture"
_PLAIN = ":@+="
"""Characters of a session's name that need no quoting in a path, besides letters, digits and `_.-~`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,199}")
_ROUTE = re.compile(rf"(?:(?:{_SESSION}|{_GYM})[^/]+)?(?:{_GYM_CAPTURE})?(?:{_HARNESS}[^/]+)?(?:(?:/tokencache)?/v1|/tokencache/ui)?$")
"""What users copy from a harness's URL at the end of a base URL. It matches every path, often with nothing."""

_SLASHES = re.compile("/{2,}")

BASE_URL_ADVICE = (
    "Name the address of `tokencache serve`, such as http://127.0.0.1:8100: not the engine's address, and without /v1 or /s/SESSION."
)
"""What to do if a URL is not the base URL of a proxy."""


def check_proxy_url(url: str) -> str:
    """Return the base URL of a proxy, without a slash at its end. The path of a gateway before the proxy may be part of it.

    Raises:
        ValueError: it cannot be one. The message names the URL, without user and password, and the right one if that can be derived.
    """
    shown = printable_url(url)
    try:
        parts = urlsplit(url)
        _ = parts.port  # urlsplit checks the port only when it is read
    except ValueError as error:
        raise _not_a_base_url(shown, str(error)) from None
    web = parts.scheme in {"http", "https"}
    if not url.isprintable() or " " in url:
        raise _not_a_base_url(shown, "it contains a blank or a character that cannot be printed")
    if not web and "://" in url:
        raise _not_a_base_url(shown, f"its scheme is {parts.scheme!r}, not http or https")
    if not web and url.strip("/"):
        raise _not_a_base_url(shown, "it has no scheme", f"http://{_without_route(shown.strip('/'))}")
    if not parts.hostname:
        raise _not_a_base_url(shown, "it names no host")
    if "?" in url or "#" in url:
        raise _not_a_base_url(shown, "it has a query or a fragment", _without_route(shown))
    base, given = _without_route(shown), shown.rstrip("/")
    if base != given:
        raise _not_a_base_url(shown, f"{given.removeprefix(base)!r} belongs to a route of the proxy", base)
    return url.rstrip("/")


def _not_a_base_url(shown: str, fault: str, right: str = "") -> ValueError:
    advice = f"Use {right!r}." if right else BASE_URL_ADVICE
    return ValueError(f"{shown!r} is not the base URL of a tokencache proxy: {fault}. {advice}")


def _without_route(url: str) -> str:
    scheme, slashes, rest = url.rpartition("://")
    host, slash, path = rest.rstrip("/").partition("/")
    return f"{scheme}{slashes}{host}{_ROUTE.sub('', slash + path, count=1)}"


def printable_url(url: str) -> str:
    """Return a URL for messages: without user, password, query and fragment, which may hold secrets."""
    return re.sub(r"^([A-Za-z]+://)?[^/]*@", r"\1", re.split("[?#]", url)[0])


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to this address. The only accepted host name is `localhost`: others may resolve to anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def is_local(url: str) -> bool:
    """Whether a URL is one of this machine, without TLS. httpx then needs nothing of the environment, and no `HTTP_PROXY` can reach it."""
    parts = urlsplit(url)
    return parts.scheme == "http" and is_loopback(parts.hostname or "")


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


class NamedPath(msgspec.Struct, frozen=True):
    """A path as it was received, with its query, and what it names.

    Attributes:
        raw: the path.
        session: the session; `None` if it names none.
        harness: the same for the harness.
        rest: the path without them.
        route: the same without the query.
    """

    raw: str
    session: str | None
    harness: str | None
    rest: str
    route: str

    @classmethod
    def read(cls, raw: str) -> Self:
        """Split a path. It may begin with several slashes: base URLs are also made of `http://HOST:PORT/` and `/s/<session>`."""
        session, rest = split_session(f"/{raw.lstrip('/')}" if raw.startswith("//") else raw)
        harness, rest = _split(_HARNESS, rest)
        return cls(raw, session, harness, rest, rest.partition("?")[0])


def spellings(route: str) -> list[str]:
    """Return the ways in which a server may read a route: without repeated slashes and one at the end, and percent-decoded.

    vLLM's server decodes a path once (uvicorn 0.51), and answers a slash at the end with a redirect (Starlette).
    """
    plain = _plain(route)
    return [plain, _plain(unquote(plain))] if "%" in plain else [plain]


def _plain(route: str) -> str:
    return _SLASHES.sub("/", route).rstrip("/") or "/"


def _split(prefix: str, path: str) -> tuple[str | None, str]:
    if not path.startswith(prefix):
        return None, path
    name, slash, rest = path[len(prefix) :].partition("/")
    return unquote(name), slash + rest or "/"

"""Fills in an adapter for one session: command line, environment variables and files of the harness.

The base URL names the session, `http://HOST:PORT/s/<session>/h/<harness>`, because every harness uses it for every call. The key names
the session again, for harnesses that rebuild the URL. The key is in variables and in files that only the user can read, never on a
command line, which other users can see.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tokencache.adapters.files import render
from tokencache.adapters.load import AdapterError
from tokencache.adapters.schema import PLACEHOLDER, Adapter
from tokencache.session_url import check_name, check_proxy_url, is_loopback, session_key, session_url

DEFAULT_CONTEXT = 131072
"""The longest context in tokens, if the engine does not report one."""

_MAX_OUTPUT = 32000
_OWN_PREFIX = "TOKENCACHE_"
_WEB_PROXIES, _NO_PROXY = frozenset({"http_proxy", "https_proxy", "all_proxy"}), "no_proxy"


class Launch(msgspec.Struct, frozen=True):
    """How to start a harness.

    Attributes:
        argv: the program and its first arguments; the user's arguments follow. Empty if the program is the user's own.
        env: variables to set.
        unset: variables to remove.
        files: path → content; `files.write` writes them.
        host: the proxy's host if it is this machine, else `""`.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    unset: tuple[str, ...]
    files: dict[Path, str]
    host: str = ""

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of the harness.

        Variables `TOKENCACHE_…` are removed: an agent can read its environment, and they include the admin key and the engine's key. If
        `HTTP_PROXY` or the like is set, `NO_PROXY` names the proxy's host on this machine, which a web proxy cannot reach.
        """
        kept = {name: value for name, value in inherited.items() if not name.startswith(_OWN_PREFIX) and name not in self.unset}
        if self.host and not _WEB_PROXIES.isdisjoint(map(str.lower, kept)):
            given = {name: value for name, value in kept.items() if name.lower() == _NO_PROXY}  # programs read different spellings
            given = dict.fromkeys((_NO_PROXY.upper(), _NO_PROXY), next(iter(given.values()), "")) | given
            kept |= {name: f"{value},{self.host}".removeprefix(",") for name, value in given.items() if value != "*"}
        return {**kept, **self.env}


def prepare(  # noqa: PLR0917 - callers pass them by name
    adapter: Adapter,
    proxy_url: str,
    session: str,
    key: str | None,
    model: str,
    config_dir: Path,
    *,
    context: int = DEFAULT_CONTEXT,
) -> Launch:
    """Fill in an adapter, without writing anything.

    `proxy_url` is without `/v1`. Without a `key`, the harness sends the one that names the session. `context` is the longest, in tokens.

    Raises:
        AdapterError: the URL is invalid, or a value contains unprintable characters, which files, shells and headers do not allow.
        HarnessError: the name of the session is invalid.
    """
    try:
        check_proxy_url(proxy_url)
    except ValueError as error:
        raise AdapterError(str(error)) from None
    values: dict[str, str | int] = {
        "url": session_url(proxy_url, check_name(session), adapter.name),
        "key": key or session_key(session),
        "model": model,
        "session": session,
        "config_dir": str(config_dir),
        "context": context,
        # the engine refuses a request for more tokens than the context has left
        "max_output": min(_MAX_OUTPUT, context // 4),
    }
    for name, value in values.items():
        if not str(value).isprintable():
            raise AdapterError(f"{name}: {value!r} contains characters that cannot be printed")
    return Launch(
        argv=tuple(_fill(text, values) for text in adapter.program),
        env={name: _fill(text, values) for name, text in adapter.variables.items()},
        unset=adapter.unset,
        files={config_dir / file.path: render(file.format, _fill_all(file.content, values)) for file in adapter.files},
        host=host if is_loopback(host := urlsplit(proxy_url).hostname or "") else "",
    )


def _fill(text: str, values: Mapping[str, str | int]) -> str:
    return PLACEHOLDER.sub(lambda found: str(values[found[1]]), text)


def _fill_all(value: Any, values: Mapping[str, str | int]) -> Any:
    """Fill in nested data, including keys. A string that is only a placeholder becomes its value, which may be a number."""
    match value:
        case str():
            alone = PLACEHOLDER.fullmatch(value)
            return values[alone[1]] if alone else _fill(value, values)
        case dict():
            return {_fill(name, values): _fill_all(member, values) for name, member in value.items()}
        case list():
            return [_fill_all(member, values) for member in value]
        case _:
            return value

"""Fills an adapter in: the command line, the environment and the files with which a harness is started for one session.

Everything that names the session travels in the base URL, `http://HOST:PORT/s/<session>/h/<harness>`, since that is what
every harness sends on every call, its side calls included; the key repeats it for those that rebuild the URL. The key
stands in the environment and in files that only the user can read, never on a command line, where other users could.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tokencache.adapters.files import render
from tokencache.adapters.load import AdapterError
from tokencache.adapters.schema import PLACEHOLDER, Adapter
from tokencache.session_url import check_name, session_key, session_url

DEFAULT_CONTEXT = 131072
"""Tokens that a harness is told a context may have, where the engine does not say."""

_MAX_OUTPUT = 32000
_OURS = "TOKENCACHE_"


class Launch(msgspec.Struct, frozen=True):
    """How a harness is started.

    `argv` is the program and its first arguments, to which the user's are appended; empty where the program is the user's
    own script. `env` are the variables to set and `unset` those to take away. `files` maps paths to what they must hold;
    `files.write` puts them there.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    unset: tuple[str, ...]
    files: dict[Path, str]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of the harness.

        Variables of the proxy's own (`TOKENCACHE_…`) are not passed on: the trainer's admin key and the engine's key are
        among them, and an agent reads its environment.
        """
        kept = {name: value for name, value in inherited.items() if not name.startswith(_OURS) and name not in self.unset}
        return {**kept, **self.env}


def prepare(  # noqa: PLR0917 - who calls it names them
    adapter: Adapter,
    proxy_url: str,
    session: str,
    key: str | None,
    model: str,
    config_dir: Path,
    *,
    context: int = DEFAULT_CONTEXT,
) -> Launch:
    """Fill an adapter in; touches nothing.

    `proxy_url` is the proxy's base URL without `/v1`; `key` the API key that the harness is to send, by default the one that
    names the session; `config_dir` the directory that becomes the harness's own; `context` the longest context in tokens.

    Raises:
        AdapterError: the URL is none, or a value has control characters in it, which no file, shell or header would bear.
        HarnessError: the session's name is none.
    """
    _check_url(proxy_url)
    values: dict[str, str | int] = {
        "url": session_url(proxy_url, check_name(session), adapter.name),
        "key": key or session_key(session),
        "model": model,
        "session": session,
        "config_dir": str(config_dir),
        "context": context,
        # a harness that asks for more than is left of the context is refused by the engine
        "max_output": min(_MAX_OUTPUT, context // 4),
    }
    for name, value in values.items():
        if not str(value).isprintable():
            raise AdapterError(f"{name}: {value!r} has characters that cannot be printed")
    return Launch(
        argv=tuple(_fill(text, values) for text in adapter.program),
        env={name: _fill(text, values) for name, text in adapter.variables.items()},
        unset=adapter.unset,
        files={config_dir / file.path: render(file.format, _fill_all(file.content, values)) for file in adapter.files},
    )


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # is read, and refused, only here
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise AdapterError(f"{url!r} is no base URL of a proxy, such as http://127.0.0.1:8100")


def _fill(text: str, values: Mapping[str, str | int]) -> str:
    return PLACEHOLDER.sub(lambda found: str(values[found[1]]), text)


def _fill_all(value: Any, values: Mapping[str, str | int]) -> Any:
    """Fill in nested data, keys too; a string that is one placeholder and nothing else becomes its value, a number if it is one."""
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

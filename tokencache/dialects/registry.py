"""Lists the dialects, and finds the dialect and the API keys of a request.

To add a dialect, write a package like those in this folder and add it to `_dialects`.
"""

from collections.abc import Mapping
from functools import cache

from tokencache.dialects.anthropic.routes import AnthropicDialect
from tokencache.dialects.base import AUTHORIZATION, Dialect
from tokencache.dialects.gemini.routes import GeminiDialect
from tokencache.dialects.probes import ProbeDialect
from tokencache.dialects.responses.routes import ResponsesDialect
from tokencache.dialects.untranslated import ChatDialect, TextDialect

CHAT: Dialect = ChatDialect()
"""Chat completions: every other dialect is translated into it, and its clients get the engine's own bytes."""
_dialects: list[Dialect] = [CHAT, AnthropicDialect(), GeminiDialect(), ResponsesDialect(), TextDialect(), ProbeDialect()]


def register(dialect: Dialect) -> None:
    """Add a dialect at run time; it goes before the built-in ones, except chat completions."""
    _dialects.insert(1, dialect)
    credential_headers.cache_clear()
    credential_parameters.cache_clear()


def unregister(dialect: Dialect) -> None:
    """Remove a dialect that was added with `register`."""
    _dialects.remove(dialect)
    credential_headers.cache_clear()
    credential_parameters.cache_clear()


def dialect_names() -> list[str]:
    """The names of the dialects in which clients call a model."""
    return [dialect.name for dialect in _dialects if not isinstance(dialect, ProbeDialect)]


def dialect_of(method: str, path: str, headers: Mapping[str, str]) -> Dialect | None:
    """Find the dialect of a request; `path` without its query. `None` for a route that no dialect owns."""
    return next((dialect for dialect in _dialects if dialect.matches(method, path, headers)), None)


@cache
def credential_headers() -> tuple[str, ...]:
    """The headers in which clients of any dialect send an API key."""
    return tuple(dict.fromkeys(name for dialect in _dialects for name in dialect.credential_headers))


@cache
def credential_parameters() -> tuple[str, ...]:
    """The query parameters in which clients of any dialect send an API key."""
    return tuple(dict.fromkeys(name for dialect in _dialects for name in dialect.credential_parameters))


def keys_in(headers: Mapping[str, str]) -> list[str]:
    """The API keys in the headers of a request; a bearer token without its scheme."""
    keys = []
    for name in credential_headers():
        value = headers.get(name, "")
        if value and name == AUTHORIZATION:
            scheme, _, token = value.partition(" ")
            value = token.strip() if scheme.lower() == "bearer" else ""
        if value:
            keys.append(value)
    return keys

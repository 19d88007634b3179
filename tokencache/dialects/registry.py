"""Lists the dialects, and finds the dialect and the API keys of a request.

To add a dialect, write a package like those in this folder and add it to `_translated`.
"""

from collections.abc import Mapping, MutableMapping
from functools import cache

from tokencache.dialects.anthropic.routes import AnthropicDialect
from tokencache.dialects.base import AUTHORIZATION, Dialect, TranslatedDialect
from tokencache.dialects.chat.routes import ChatDialect
from tokencache.dialects.gemini.routes import GeminiDialect
from tokencache.dialects.probes import ProbeDialect
from tokencache.dialects.responses.routes import ResponsesDialect

CHAT: Dialect = ChatDialect()
"""Chat completions: every other dialect is translated into it, and its clients get the engine's own bytes."""
_translated: list[TranslatedDialect] = [AnthropicDialect(), GeminiDialect(), ResponsesDialect(), ProbeDialect()]


def register(dialect: TranslatedDialect) -> None:
    """Add a dialect at run time; it goes before the built-in ones."""
    _translated.insert(0, dialect)
    credential_headers.cache_clear()
    credential_parameters.cache_clear()


def unregister(dialect: TranslatedDialect) -> None:
    """Remove a dialect that was added with `register`."""
    _translated.remove(dialect)
    credential_headers.cache_clear()
    credential_parameters.cache_clear()


def dialect_names() -> list[str]:
    """The names of the dialects in which clients call a model."""
    return [CHAT.name, *(dialect.name for dialect in _translated if not isinstance(dialect, ProbeDialect))]


def dialect_of(method: str, path: str, headers: Mapping[str, str]) -> TranslatedDialect | None:
    """Find the dialect to translate a request from; `path` without its query. `None` for chat completions and all other routes."""
    return next((dialect for dialect in _translated if dialect.matches(method, path, headers)), None)


@cache
def credential_headers() -> tuple[str, ...]:
    """The headers in which clients of any dialect send an API key."""
    return tuple(dict.fromkeys(name for dialect in (CHAT, *_translated) for name in dialect.credential_headers))


@cache
def credential_parameters() -> tuple[str, ...]:
    """The query parameters in which clients of any dialect send an API key."""
    return tuple(dict.fromkeys(name for dialect in (CHAT, *_translated) for name in dialect.credential_parameters))


def keys_in(headers: Mapping[str, str]) -> list[str]:
    """The API keys in the headers of a request, `""` for a header without one; a bearer token without its scheme."""
    keys = []
    for name in credential_headers():
        value = headers.get(name, "")
        if name == AUTHORIZATION:
            scheme, _, token = value.partition(" ")
            value = token.strip() if scheme.lower() == "bearer" else ""
        keys.append(value)
    return keys


def use_bearer(headers: MutableMapping[str, str]) -> None:
    """Move an API key from a dialect's own header into `Authorization`, where engines read it, unless that header exists already."""
    keys = [headers.pop(name) for name in credential_headers() if name != AUTHORIZATION and name in headers]
    if keys:
        headers.setdefault(AUTHORIZATION, f"Bearer {keys[0]}")

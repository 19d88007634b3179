"""The dialects that the proxy speaks within a session, in one tuple; the first that knows a request reads it.

Chat completions are not among them: they are what everything else is turned into (`chat`), and the harness sees the
engine's own bytes.
"""

from collections.abc import Mapping

from tokencache.dialects.anthropic.codec import MessagesDialect
from tokencache.dialects.dialect import Dialect
from tokencache.dialects.gemini.codec import GeminiDialect
from tokencache.dialects.probes import ProbeDialect
from tokencache.dialects.responses.codec import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (MessagesDialect(), GeminiDialect(), ResponsesDialect(), ProbeDialect())


def dialect_of(method: str, path: str, headers: Mapping[str, str]) -> Dialect | None:
    """Find the dialect of a request; `path` without its query."""
    return next((dialect for dialect in DIALECTS if dialect.speaks(method, path, headers)), None)

"""The chat completions dialect: its routes, credential header and error shape.

Requests are not translated (`request`), and clients get the engine's own bytes (`reply`). Text completions and `/tokenize` share the
error shape.
"""

import msgspec

from tokencache.dialects.base import Dialect

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
ROUTES = frozenset({CHAT, COMPLETIONS, TOKENIZE})


class ChatDialect(Dialect):
    """OpenAI chat completions, as vLLM 0.32 serves them."""

    name = "chat"

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        """Write OpenAI's error body as vLLM does; see `Dialect.error`."""
        return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})

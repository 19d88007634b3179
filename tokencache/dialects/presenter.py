"""Presenters: the speakers of what is not translated, where the harness sees the engine's own bytes.

Chat and text completions are answered with what the engine sent, less what only the proxy asked for. What is ours in such an
answer is said as vLLM (0.32) says it.
"""

import msgspec

from tokencache.dialects.sse import DONE, event_of


class Presenter:
    """What both have in common of `dialect.Speaker`."""

    def end(self) -> bytes:
        """See `Speaker.end`."""
        return event_of(DONE)

    def keep_alive(self) -> bytes:
        """See `Speaker.keep_alive`: a comment, which every reader of events passes over."""
        return b": keep-alive\n\n"

    def failed(self, status: int, message: str) -> bytes:
        """See `Speaker.failed`."""
        error = {"message": message, "type": "store_error", "param": None, "code": status}
        return event_of(msgspec.json.encode({"error": error})) + event_of(DONE)

    def documents(self) -> dict[str, bytes]:
        """See `Speaker.documents`: none, these are not asked for again."""
        return {}

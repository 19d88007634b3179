"""Presenters: the speakers of what is not translated, where the harness sees the engine's own bytes.

Chat and text completions are answered with what the engine sent, less what only the proxy asked for. What is ours in such an
answer is said as vLLM (0.32) says it.

Routed experts are never shown (`routing`): an engine that gives them gives them unasked, and they are the trainer's. Weight
versions are shown to who asked for them; who did not gets a reply without the member (vLLM 0.33).
"""

from collections.abc import Callable, Mapping

import msgspec

from tokencache.dialects import routing
from tokencache.dialects.sse import DONE, event_of

Raw = msgspec.Raw

_NULL = Raw(b"null")
_VERSIONS = "weight_versions"
_UNAVAILABLE = 503


class ExtraMembers:
    """What a reply may hold besides ids and log probabilities, and what of it the harness sees that sent the members `fields`."""

    def __init__(self, fields: Mapping[str, Raw]) -> None:
        self._shows_versions = bytes(fields.get(f"return_{_VERSIONS}", _NULL)) == b"true"

    def found(self, data: bytes) -> bool:
        """Whether something in a reply's JSON is to be hidden."""
        return routing.there(data) or (not self._shows_versions and b'"%s":' % _VERSIONS.encode() in data)

    def hide(self, choice: dict[str, Raw]) -> None:
        """Hide it in one choice."""
        if "routed_experts" in choice:
            choice["routed_experts"] = _NULL
        if not self._shows_versions:
            choice.pop(_VERSIONS, None)


class Presenter:
    """What both have in common of `dialect.Speaker`."""

    @property
    def unread(self) -> Callable[[bytes], bytes | None] | None:
        """See `Speaker.unread`: nothing does."""
        return None

    def end(self) -> bytes:
        """See `Speaker.end`."""
        return event_of(DONE)

    def keep_alive(self) -> bytes:
        """See `Speaker.keep_alive`: a comment, which every reader of events passes over."""
        return b": keep-alive\n\n"

    def failed(self, status: int, message: str) -> bytes:
        """See `Speaker.failed`."""
        kind = "store_error" if status == _UNAVAILABLE else "upstream_error"
        error = {"message": message, "type": kind, "param": None, "code": status}
        return event_of(msgspec.json.encode({"error": error})) + event_of(DONE)

    def documents(self) -> dict[str, bytes]:
        """See `Speaker.documents`: none, these are not asked for again."""
        return {}

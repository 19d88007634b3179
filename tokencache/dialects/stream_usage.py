"""Requests the usage of every stream from the engine, and hides it from clients that did not request it.

The usage says how many tokens were sampled, which proves that no event of the stream was lost (`engine.figures`). vLLM sends it in an event
of its own after the last choice. That event also has the `system_fingerprint`, which is otherwise in the event that finishes a choice
(0.32, `chat_completion/serving.py`). So for a client without usage, the event that first finishes a choice waits for it, and so does what
follows that event; then the finishing events get the fingerprint.

`continuous_usage_stats` is not added for vLLM, which it makes slow (`engine.figures`). An engine with `--enable-force-include-usage` puts
the usage into all events, whatever a client requests. They are passed on, because a direct client would get them.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.dialects.json_io import FIELDS, NULL
from tokencache.dialects.sse import event_of

Raw = msgspec.Raw

_OPTIONS, _INCLUDE, _CONTINUOUS = "stream_options", "include_usage", "continuous_usage_stats"
_FINISH, _NAME, _ERROR = b'"finish_reason":"', b'"usage":', b'"error":'
_FINGERPRINT = "system_fingerprint"


def _options(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """Return the stream's options, which are an object or `null` (`chat.scalars`)."""
    return msgspec.json.decode(fields.get(_OPTIONS, NULL)) or {}


def requests_usage(fields: Mapping[str, Raw]) -> bool:
    """Whether a request (its raw members) requests the usage."""
    return bool(_options(fields).get(_INCLUDE))


def requests_continuous_usage(fields: Mapping[str, Raw]) -> bool:
    """Whether a request (its raw members) requests the usage in each chunk."""
    return requests_usage(fields) and bool(_options(fields).get(_CONTINUOUS))


def with_continuous_usage(fields: Mapping[str, Raw]) -> dict[str, Raw]:
    """Return a streaming request's members with a request for the usage in each chunk."""
    return {**fields, _OPTIONS: Raw(msgspec.json.encode({**_options(fields), _INCLUDE: True, _CONTINUOUS: True}))}


def with_usage(fields: dict[str, Raw]) -> dict[str, Raw]:
    """Return a streaming request's members with a request for the usage."""
    options = _options(fields)
    if options.get(_INCLUDE):
        return fields
    options.pop(_CONTINUOUS, None)
    return {**fields, _OPTIONS: Raw(msgspec.json.encode({**options, _INCLUDE: True}))}


class HiddenUsage:
    """Hides the usage in the events of one stream, if its request (raw members) did not ask for it."""

    __slots__ = ("_hides", "_waiting")

    def __init__(self, fields: Mapping[str, Raw]) -> None:
        self._hides = bytes(fields.get("stream", NULL)) == b"true" and not requests_usage(fields)
        self._waiting: list[tuple[bytes, bytes]] = []  # events and their JSON: the first one that finished a choice, and what followed

    @property
    def keeps_back(self) -> bool:
        """Whether events wait. Then all later ones must wait, too."""
        return bool(self._waiting)

    def present(self, event: bytes, data: bytes) -> bytes:
        """Return what the client gets for an event, and for those that waited for it; `data` is the event's JSON."""
        if not self._hides:
            return event
        if _NAME in data and (usage := _usage_of(data)) is not None:
            choices, fingerprint = usage
            if bytes(choices) == b"[]":
                return self.rest(fingerprint)
            self._hides = False  # the engine sends it to all clients
        elif _ERROR not in data and (self._waiting or _FINISH in data):
            self._waiting.append((event, data))
            return b""
        return self.rest() + event if self._waiting else event

    def rest(self, fingerprint: Raw = NULL) -> bytes:
        """Return the events that still wait, with the engine's fingerprint if it is known."""
        waiting, self._waiting = self._waiting, []
        return b"".join([_with_fingerprint(event, data, fingerprint) for event, data in waiting]) if waiting else b""


def _usage_of(data: bytes) -> tuple[Raw, Raw] | None:
    """Return the choices and the fingerprint of a chunk with usage; `None` if it has none."""
    try:
        fields = FIELDS.decode(data)
    except (ValueError, RecursionError):
        return None
    if bytes(fields.get("usage", NULL)) == b"null":
        return None
    return fields.get("choices", NULL), fields.get(_FINGERPRINT, NULL)


def _with_fingerprint(event: bytes, data: bytes, fingerprint: Raw) -> bytes:
    if bytes(fingerprint) == b"null" or _FINISH not in data:
        return event
    try:
        return event_of(msgspec.json.encode({**FIELDS.decode(data), _FINGERPRINT: fingerprint}))
    except (ValueError, RecursionError):
        return event

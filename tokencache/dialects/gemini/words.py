"""Chat's words in Gemini's: why a reply ended, what it used, what went wrong, and arguments as an object."""

from typing import Any

import msgspec

from tokencache.dialects import lenient
from tokencache.dialects.completion_reader import Usage

Raw = msgspec.Raw

_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""google.rpc.Code by HTTP status (googleapis, `google/rpc/code.proto`)."""
_SERVERS_FAULT = 500


def finish_reason_of(reason: str | None) -> str:
    """Say why a reply ended; what Gemini has no word for is `OTHER`."""
    return _REASONS.get(reason or "", "OTHER")


def error_of(status: int, message: str) -> dict[str, Any]:
    """Say an error in Gemini's words (google.rpc.Status in its JSON form)."""
    name = _STATUSES.get(status) or ("INTERNAL" if status >= _SERVERS_FAULT else "INVALID_ARGUMENT")
    return {"error": {"code": status, "message": message, "status": name}}


def object_of(arguments: str) -> Raw | dict[str, Any] | None:
    """Arguments as a member: their own text on one line where it is JSON of an object; `None` if they are none."""
    if not arguments.strip():
        return {}
    try:
        found = lenient.read(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    try:
        return Raw(msgspec.json.format(arguments, indent=-1).encode())
    except (ValueError, RecursionError):
        return Raw(lenient.write(found))


def usage_of(usage: Usage | None) -> dict[str, Any]:
    """`usageMetadata`, in tokens: thoughts are not among the candidates' (google-genai 3.4, `candidates_token_count`)."""
    if usage is None:
        return {}
    said = {"promptTokenCount": usage.prompt_tokens, "candidatesTokenCount": usage.completion - usage.reasoning}
    if usage.reasoning:
        said["thoughtsTokenCount"] = usage.reasoning
    if usage.cached:
        said["cachedContentTokenCount"] = usage.cached
    return said | {"totalTokenCount": usage.prompt_tokens + usage.completion}

"""Chat's words in Gemini's: why a reply ended, what it used, what went wrong, and arguments as an object."""

import json
from typing import Any

import msgspec

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
SERVER_FAULT = 500


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """An engine's `usage`, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


def finish_reason_of(reason: str | None) -> str:
    """Say why a reply ended; what Gemini has no word for is `OTHER`."""
    return _REASONS.get(reason or "", "OTHER")


def error_of(status: int, message: str) -> dict[str, Any]:
    """Say an error in Gemini's words (google.rpc.Status in its JSON form)."""
    name = _STATUSES.get(status) or ("INTERNAL" if status >= SERVER_FAULT else "INVALID_ARGUMENT")
    return {"error": {"code": status, "message": message, "status": name}}


def object_of(arguments: str) -> Raw | dict[str, Any] | None:
    """Arguments as a member: their own text on one line where it is JSON of an object; `None` if they are none."""
    if not arguments.strip():
        return {}
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return Raw(msgspec.json.format(arguments, indent=-1).encode())
    except (ValueError, RecursionError):
        try:  # lone surrogates, which only escapes can spell
            read = json.loads(arguments, parse_constant=_no_number)
            return Raw(json.dumps(read, separators=(",", ":")).encode()) if isinstance(read, dict) else None
        except (ValueError, RecursionError):
            return None
    return None


def _no_number(name: str) -> Any:
    raise ValueError(name)


def usage_of(usage: Usage | None) -> dict[str, Any]:
    """`usageMetadata`, in tokens: thoughts are not among the candidates' (google-genai 3.4, `candidates_token_count`)."""
    if usage is None:
        return {}
    completion = usage.completion_tokens or 0
    thoughts = (usage.completion_tokens_details.reasoning_tokens or 0) if usage.completion_tokens_details is not None else 0
    said = {"promptTokenCount": usage.prompt_tokens, "candidatesTokenCount": completion - thoughts}
    if thoughts:
        said["thoughtsTokenCount"] = thoughts
    if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens:
        said["cachedContentTokenCount"] = usage.prompt_tokens_details.cached_tokens
    return said | {"totalTokenCount": usage.prompt_tokens + completion}

"""Anthropic Messages: errors in Anthropic's vocabulary (`anthropic` 2.12 `types/shared/error_object.py`; platform.claude.com, "Errors").

What an engine says is passed on in its own words, with one exception: clients find out that a conversation has grown too
long, and compact it, by the words in which Anthropic's API says so.
"""

import re
from typing import Any

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_SERVERS_FAULT = 500

_TOO_LONG = (
    # vLLM 0.32 `renderers/params.py`; with the prompt's ids supplied, its engine says it in other words
    re.compile(r"context length is (?P<limit>\d+) tokens\. However, your prompt contains (?:at least )?(?P<tokens>\d+) input tokens"),
    re.compile(r"Input length \((?P<tokens>\d+)\) exceeds model's maximum context length \((?P<limit>\d+)\)"),
)


def error_members(status: int, message: str) -> dict[str, Any]:
    """What an error's body consists of, and its event in a stream; `status` is HTTP's."""
    kind = _TYPES.get(status) or ("api_error" if status >= _SERVERS_FAULT else "invalid_request_error")
    found = next((found for pattern in _TOO_LONG if (found := pattern.search(message))), None)
    if found is not None:
        message = f"prompt is too long: {found['tokens']} tokens > {found['limit']} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}

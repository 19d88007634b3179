"""Responses: errors in OpenAI's vocabulary (platform.openai.com, "Error codes"; openai 3.52 reads `type`, `param` and `code`).

vLLM's types are the names of its exceptions; OpenAI has few types, and a `code` for what harnesses look for: an unknown model,
a response that is not kept, a conversation that has grown too long (Codex then compacts it).
"""

from typing import Any

NO_PREVIOUS = "previous_response_not_found"
_TYPES = {
    "BadRequestError": "invalid_request_error",
    "NotFoundError": "invalid_request_error",
    "NotImplementedError": "invalid_request_error",
    "InternalServerError": "server_error",
    NO_PREVIOUS: "invalid_request_error",
}
"""OpenAI's word for vLLM's (0.32, `entrypoints/utils.py`); types that are not vLLM's stay."""

_TOO_LONG = ("maximum context length", "maximum model length")


def error_members(message: str, kind: str, param: str | None) -> dict[str, Any]:
    """What an error consists of; `kind` is vLLM's type, or ours."""
    code = _code(message, kind, param)
    said = "invalid_request_error" if code == "context_length_exceeded" else _TYPES.get(kind, kind)
    return {"message": message, "type": said, "param": param, "code": code}


def _code(message: str, kind: str, param: str | None) -> str | None:
    if any(words in message for words in _TOO_LONG):
        return "context_length_exceeded"
    if kind == "NotFoundError" and (param == "model" or message.startswith("The model ")):
        return "model_not_found"
    return kind if kind == NO_PREVIOUS else None

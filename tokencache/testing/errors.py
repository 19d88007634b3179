"""Defines the refusals of the simulated engine: status codes and error bodies as vLLM (and OpenAI) send them.

vLLM 0.32 refuses at two stages. First the *schema*: JSON that does not parse, or a field of a wrong type, gives `"type": "Bad Request"` and
a message that lists the faults. Then a well-formed but invalid value gives `"type": "BadRequestError"` and a sentence. Both are 400; only
an unknown model is 404. The texts were recorded from a running 0.32.0 server.
"""

from typing import Any


class RefusalResponse(Exception):  # noqa: N818 - a response, not a failure
    """A response other than 200, raised while a request is handled."""

    def __init__(
        self, message: str, *, param: str | None = None, kind: str = "BadRequestError", status: int = 400, by_engine: bool = False
    ) -> None:
        """`by_engine`: the engine refuses after the API server has started a stream, so the refusal is an event of a 200."""
        super().__init__(message)
        self.by_engine = by_engine
        self.message = message
        self.param = param
        self.kind = kind
        self.status = status
        self.headers: dict[str, str] = {}

    def body(self) -> dict[str, Any]:
        """Return the JSON body, with the keys in vLLM's order."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


def schema_refusal(location: str, kind: str, message: str, given: Any, context: dict[str, Any] | None = None) -> RefusalResponse:
    """Refuse a field of a wrong type: `location` is its path (`body.n`), `kind` pydantic's name of the error."""
    fault: dict[str, Any] = {"type": kind, "loc": location, "msg": message, "input": _summary(given)}
    if context is not None:
        fault["ctx"] = context
    return RefusalResponse(f"1 validation error:\n  {fault}", param=location, kind="Bad Request")


def _summary(value: Any) -> str:
    """Describe a given value in few characters."""
    if isinstance(value, (dict, list)):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def unknown_model(given: str, served: str) -> RefusalResponse:
    """Refuse an unknown model."""
    message = f"The model `{given}` does not exist. Valid aliases: {served}."
    return RefusalResponse(message, param="model", kind="NotFoundError", status=404)


def senseless(message: str, param: str | None = None, value: Any = None, *, by_engine: bool = False) -> RefusalResponse:
    """Refuse a well-formed field with an invalid value. vLLM puts field and value at the end of the message."""
    if param is None:
        return RefusalResponse(message)
    shown = "" if value is None else f", value={value}"
    return RefusalResponse(f"{message} (parameter={param}{shown})", param=param, by_engine=by_engine)


def room_for_reply(length: int, max_tokens: int | None, limit: int, *, rendered: bool) -> int:
    """Return how many tokens may follow a prompt of `length` tokens, at least 1.

    `rendered`: the prompt was given as text; for ids vLLM uses another message.

    Raises:
        RefusalResponse: the prompt or `max_tokens` is too long.
    """
    if length > limit and not rendered:
        raise RefusalResponse(f"Input length ({length}) exceeds model's maximum context length ({limit}).")
    if length > limit:
        raise senseless(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {limit + 1} input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            limit + 1,
        )
    if max_tokens is not None and max_tokens > limit:
        message = f"max_tokens={max_tokens} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
        raise senseless(message, "max_tokens", max_tokens)
    room = limit - length if max_tokens is None else min(limit - length, max_tokens)
    if room < 1:
        raise senseless(f"max_tokens must be at least 1, got {room}.", "max_tokens", room)
    return room

r"""Proves from renderings where the last reply of a conversation ends. Pure functions.

The exact prefix replaces everything up to the end of the last assistant message. The position of that end is never found by counting, or by
searching in text that users can write. Instead, conversations that end like the real one are rendered with a *sentinel* in place of the
reply: in its text, or, if it made calls, in the arguments of the last call, because templates put calls after the text. Two sentinels
without a common beginning or end show what follows the reply. Other words in the new messages show how much of that is the template's own:

    <|im_start|>assistant\nQa1b2x<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n
                           ^^^^^^ sentinel
                                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ the template's own
                                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ what follows the reply

The reply ends at the first stop id in the template's own part. Everything from there on must equal the end of the real conversation's
rendering, up to the last id; otherwise nothing is spliced.

NeMo RL (`nemo_rl/models/generation/openai_server_utils.py`) uses the N-th EOS of the rendering instead; it counts in a rendering that ends
with the reply. That is right if each message before the reply has the same stop ids in both renderings. Then this module gives the same
ids.
"""

import json
import secrets
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

_RUN = secrets.token_hex(4)
SENTINELS = (f"Q{_RUN}x", f"W{_RUN[::-1]}k")
"""Random texts, which the authors of messages cannot know."""

ASK = {"role": "user", "content": "."}
"""The user message of a small conversation."""


class UnprovenError(Exception):
    """The end of the reply cannot be proven; the message has the reason."""


class OtherStopError(UnprovenError):
    """The prefix ends with another stop id than the template's (`rendered`)."""

    def __init__(self, message: str, rendered: int) -> None:
        super().__init__(message)
        self.rendered = rendered


class HiddenError(UnprovenError):
    """The template does not render the sentinel. For example, Llama-3's renders no calls."""


class Renderings(NamedTuple):
    """Ids of three renderings: with the first sentinel, with the second, and with the first and other words in the new messages.

    `before_calls` is whether calls follow the sentinel. Then the end of the reply is known only if there is a single stop id.
    """

    first: Sequence[int]
    second: Sequence[int]
    other_words: Sequence[int]
    before_calls: bool = False


def last_reply(messages: Sequence[dict[str, Any]]) -> int:
    """Find the last assistant message.

    Raises:
        UnprovenError: there is no assistant message.
    """
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].get("role") == "assistant":
            return at
    raise UnprovenError("there is no assistant message at whose end the prefix could end")


def stand_in(reply: dict[str, Any], sentinel: str, *, in_text: bool) -> dict[str, Any]:
    """Make an assistant message like `reply` with a sentinel at its end: in its last call, or in its text."""
    calls = reply.get("tool_calls") or []
    if not calls:
        return {"role": "assistant", "content": sentinel}
    arguments = ["{}"] * (len(calls) - 1) + ["{}" if in_text else json.dumps({"s": sentinel})]
    said = [{**call, "function": {**call.get("function", {}), "arguments": words}} for call, words in zip(calls, arguments, strict=True)]
    text = sentinel if in_text else ("." if reply.get("content") else None)
    return {"role": "assistant", "content": text, "tool_calls": said}


def reworded(messages: Sequence[dict[str, Any]], stops: Sequence[str]) -> list[dict[str, Any]]:
    """Insert other words into the texts of messages.

    The words are inserted into the middle, because templates inspect beginning and end (for Qwen3's, a text in `<tool_response>` is not a
    query). If any message contains a stop id, they are inserted at the beginning; otherwise that id would look like the template's own.
    """
    has_stop = any(stop and stop in json.dumps(messages, ensure_ascii=False, default=str) for stop in stops)

    def with_words(text: str) -> str:
        at = 0 if has_stop else len(text) // 2
        return text[:at] + SENTINELS[1] + text[at:]

    def part_of(part: Any) -> Any:
        if isinstance(part, str):
            return with_words(part)
        return {**part, "text": with_words(part["text"])} if isinstance(part, dict) and isinstance(part.get("text"), str) else part

    def one(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": with_words(content)}
        return {**message, "content": [part_of(part) for part in content]} if isinstance(content, list) else message

    return [one(message) for message in messages]


def splice(
    prefix: Sequence[int], rendered: Sequence[int], shown: Renderings, stop_ids: AbstractSet[int], *, turn_end: int | None = None
) -> list[int]:
    """Replace everything up to the end of the last reply by the exact prefix.

    Args:
        prefix: the exact ids, not empty. If they do not end with a stop id, the reply was cut off, and the template's end of turn follows.
        rendered: the rendering of the real conversation.
        shown: renderings of conversations that end like it.
        stop_ids: the ids at which the model stops.
        turn_end: the template's end of turn, if it is known to follow a reply whatever message is next. Then another stop id that the model
            sampled replaces it.

    Returns:
        The ids of the prompt.

    Raises:
        HiddenError: the template does not render the sentinel.
        OtherStopError: the prefix ends with another stop id than the template's, and the template's is not `turn_end`.
        UnprovenError: no stop id of the template's own ends the reply, or the real conversation is rendered differently.
    """
    first = shown.first
    start = len(first) - _common_end(first, shown.second)
    own = _common_head(first, shown.other_words)
    if list(first) == list(shown.second):
        raise HiddenError("the template does not render the last assistant message")
    if own <= start and own < len(first):
        raise UnprovenError("the template puts new messages before the end of the last assistant message")
    ends = [at for at in range(start, own) if first[at] in stop_ids]
    if not ends:
        raise UnprovenError("the template puts no stop id between the last assistant message and the words of the next")
    if shown.before_calls and len(ends) > 1:
        raise UnprovenError("the template puts several stop ids after the text of the last assistant message")
    end, after = ends[0], ends[0]
    if prefix[-1] in stop_ids:
        same = next((at for at in ends if first[at] == prefix[-1]), None)
        if same is None and first[end] != turn_end:
            raise OtherStopError(f"the prefix ends with the stop id {prefix[-1]} where the template has {first[end]}", first[end])
        end = end if same is None else same
        after = end + 1
    if list(rendered[len(rendered) - (len(first) - end) :]) != list(first[end:]):
        raise UnprovenError("the template renders what follows the last assistant message differently in this conversation")
    return [*prefix, *first[after:]]


def shows_turn_end(first: Sequence[int], second: Sequence[int], token: int) -> bool:
    """Whether `token` follows a reply at the end of a conversation, as two renderings without new messages show."""
    after = _common_end(first, second)
    return token in first[len(first) - after :]


def _common_head(one: Sequence[int], other: Sequence[int]) -> int:
    differing = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _common_end(one: Sequence[int], other: Sequence[int]) -> int:
    return _common_head(one[::-1], other[::-1])

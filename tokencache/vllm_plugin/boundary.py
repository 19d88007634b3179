r"""Where the last reply of a conversation ends, proven from renderings; pure.

The exact prefix takes the place of everything up to the end of the last assistant message. Where that end lies in a rendering is
never counted or searched for in what users can spell out. Conversations that end like the real one are rendered with a
*sentinel* in the reply's place: in its text, or, if it made calls, in the arguments of the last, because templates put calls
behind the text. Two sentinels without a common beginning or end show what stands behind the reply, and other words in the new
messages show how much of that is the template's own:

    <|im_start|>assistant\nQa1b2x<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n
                           ^^^^^^ sentinel
                                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ the template's own
                                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ behind

The reply ends at the first stop id in the template's own part. What stands from there on must be the end of the real
conversation's rendering, to the last id; otherwise nothing is spliced.

How NeMo RL finds the place (`nemo_rl/models/generation/openai_server_utils.py`: the N-th EOS of the rendering, counted in a rendering
that ends with the reply) is right wherever each message before has the same stop ids in both; this gives the same ids there.
"""

import json
import secrets
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

_RUN = secrets.token_hex(4)
SENTINELS = (f"Q{_RUN}x", f"W{_RUN[::-1]}k")
"""Unknown to those who write messages."""

ASK = {"role": "user", "content": "."}
"""What the user says in a small conversation."""


class UnprovenError(Exception):
    """It cannot be proven where the reply ends; the words say why."""


class OtherStopError(UnprovenError):
    """The prefix ends with another stop id than the template's, which is `rendered`."""

    def __init__(self, message: str, rendered: int) -> None:
        super().__init__(message)
        self.rendered = rendered


class HiddenError(UnprovenError):
    """The template does not show the sentinel: Llama-3's renders no calls."""


class Renderings(NamedTuple):
    """Ids of three renderings: with the first sentinel, with the second, and with the first and other words in the new messages.

    `before_calls` says that calls stand behind the sentinel. Then only one stop id can be told to be the reply's end.
    """

    first: Sequence[int]
    second: Sequence[int]
    other_words: Sequence[int]
    before_calls: bool = False


def last_reply(messages: Sequence[dict[str, Any]]) -> int:
    """Find the last assistant message.

    Raises:
        UnprovenError: there is none.
    """
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].get("role") == "assistant":
            return at
    raise UnprovenError("there is no assistant message at whose end the prefix could end")


def stand_in(reply: dict[str, Any], sentinel: str, *, in_text: bool) -> dict[str, Any]:
    """Make an assistant message like `reply` with a sentinel where its words end: in its last call, or in its text."""
    calls = reply.get("tool_calls") or []
    if not calls:
        return {"role": "assistant", "content": sentinel}
    arguments = ["{}"] * (len(calls) - 1) + ["{}" if in_text else json.dumps({"s": sentinel})]
    said = [{**call, "function": {**call.get("function", {}), "arguments": words}} for call, words in zip(calls, arguments, strict=True)]
    text = sentinel if in_text else ("." if reply.get("content") else None)
    return {"role": "assistant", "content": text, "tool_calls": said}


def reworded(messages: Sequence[dict[str, Any]], stops: Sequence[str]) -> list[dict[str, Any]]:
    """Put other words into messages' texts.

    Into the middle: templates look at beginning and end (to Qwen3's, a text in `<tool_response>` is no query). But in front of
    texts that spell out a stop id, or it would seem to be the template's own.
    """
    spelled = any(stop and stop in json.dumps(messages, ensure_ascii=False, default=str) for stop in stops)

    def interjected(text: str) -> str:
        at = 0 if spelled else len(text) // 2
        return text[:at] + SENTINELS[1] + text[at:]

    def part_of(part: Any) -> Any:
        if isinstance(part, str):
            return interjected(part)
        return {**part, "text": interjected(part["text"])} if isinstance(part, dict) and isinstance(part.get("text"), str) else part

    def one(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": interjected(content)}
        return {**message, "content": [part_of(part) for part in content]} if isinstance(content, list) else message

    return [one(message) for message in messages]


def splice(
    prefix: Sequence[int], rendered: Sequence[int], shown: Renderings, stop_ids: AbstractSet[int], *, turn_end: int | None = None
) -> list[int]:
    """Put the exact prefix in the place of everything up to the end of the last reply.

    Args:
        prefix: the exact ids, not empty. Where they end with no stop id the reply was cut off, and the template's end of turn follows.
        rendered: the rendering of the real conversation.
        shown: renderings of conversations that end like it.
        stop_ids: the ids at which the model stops.
        turn_end: the template's end of turn, if it was shown to be one that stands behind a reply whatever follows: another stop id
            that the model said instead takes its place.

    Raises:
        HiddenError: the template does not show the sentinel.
        OtherStopError: the prefix ends with another stop id than the template's, and `turn_end` is not the latter.
        UnprovenError: no stop id of the template's own ends the reply, or the real conversation is rendered otherwise.
    """
    first = shown.first
    start = len(first) - _common_end(first, shown.second)
    own = _common_head(first, shown.other_words)
    if list(first) == list(shown.second):
        raise HiddenError("the template does not render the last assistant message")
    if own <= start and own < len(first):
        raise UnprovenError("the template puts new messages in front of the end of the last assistant message")
    ends = [at for at in range(start, own) if first[at] in stop_ids]
    if not ends:
        raise UnprovenError("the template puts no stop id between the last assistant message and the words of the next")
    if shown.before_calls and len(ends) > 1:
        raise UnprovenError("the template puts several stop ids behind the text of the last assistant message")
    end, behind = ends[0], ends[0]
    if prefix[-1] in stop_ids:
        same = next((at for at in ends if first[at] == prefix[-1]), None)
        if same is None and first[end] != turn_end:
            raise OtherStopError(f"the prefix ends with the stop id {prefix[-1]} where the template has {first[end]}", first[end])
        end = end if same is None else same
        behind = end + 1
    if list(rendered[len(rendered) - (len(first) - end) :]) != list(first[end:]):
        raise UnprovenError("the template renders what follows the last assistant message otherwise in this conversation")
    return [*prefix, *first[behind:]]


def shows_turn_end(first: Sequence[int], second: Sequence[int], token: int) -> bool:
    """Whether `token` stands behind a reply that nothing follows, as two renderings without new messages show."""
    behind = _common_end(first, second)
    return token in first[len(first) - behind :]


def _common_head(one: Sequence[int], other: Sequence[int]) -> int:
    differing = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _common_end(one: Sequence[int], other: Sequence[int]) -> int:
    return _common_head(one[::-1], other[::-1])

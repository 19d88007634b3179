"""Splits a sequence into exchanges: the messages that each turn added, and the model's answer.

A turn stores its whole request, which repeats all earlier messages. Formats need each message once. So an *exchange* consists of the
messages since the model's last answer, and its new answer. The first exchange of a sequence has all messages of its request, including
replies that earlier sequences sampled.

An answer is the message that the proxy served, even if the harness changed it later. If the messages of a turn are not kept (text
completions, unreadable requests, torn records), or have other parts than texts and images with known bytes, the exchange has `None` in
their place. Its tokens are available in any case.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from tokencache.core.context import Context, Raw
from tokencache.core.lineage import SequenceTurn, TokenSequence
from tokencache.core.media import REFERENCE, ImageReference, texts_and_images
from tokencache.core.messages import Message
from tokencache.core.turn import Turn
from tokencache.dialects.chat.vocabulary import read_message

ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Roles that every format has (`developer` is read as `system`)."""


class TurnMessages(NamedTuple):
    """An exchange: a turn, and the messages since the model's last answer; `None` if they are not kept."""

    span: SequenceTurn
    messages: tuple[Message, ...] | None

    @property
    def turn(self) -> Turn:
        """The turn. Its `served` is the answer."""
        return self.span.turn


class SampledTokens(NamedTuple):
    """The tokens of a turn, as trainers need them.

    Attributes:
        prompt: all ids of the prompt. `added`: the ids at its end that are new in this turn.
        completion: the sampled ids.
        logprobs: one value for each id of `completion`; empty if nothing can be trained.
        mask: 1 for each id of `completion` that is trained.
    """

    prompt: list[int]
    added: list[int]
    completion: list[int]
    logprobs: list[float]
    mask: list[int]

    def trained_parts(self) -> list[tuple[list[int], list[int], list[float]]]:
        """Split the completion at ids that are not trained. Returns for each trained part all ids before it, its ids and their values."""
        found, at = [], 0
        for trained, run in groupby(self.mask):
            end = at + len(list(run))
            if trained:
                found.append(([*self.prompt, *self.completion[:at]], self.completion[at:end], self.logprobs[at:end]))
            at = end
        return found


def exchanges(sequence: TokenSequence, contexts: Mapping[str, Context]) -> list[TurnMessages]:
    """Split a sequence into exchanges, one for each turn."""
    found: list[TurnMessages] = []
    before: Context | None = None
    for span in sequence.turns:
        context = contexts.get(span.turn.id)
        found.append(TurnMessages(span, _new_messages(context, before, first=not found)))
        before = context
    return found


def _new_messages(context: Context | None, before: Context | None, *, first: bool) -> tuple[Message, ...] | None:
    if context is None or not context.messages:
        return None
    if first:
        return _read(context.messages)
    if before is None:
        return None
    since = _read(context.messages[len(before.messages) :])
    # The request repeats the messages of the turn before, then that turn's answer as the harness sent it back, then the new messages.
    return since[1:] if since and since[0].role == "assistant" else None


def _read(raw: Sequence[Raw]) -> tuple[Message, ...] | None:
    """Read raw messages; `None` if one of them cannot be read, or has other parts than texts and images with known bytes."""
    try:
        read = tuple(read_message(msgspec.json.decode(one)) for one in raw)
    except (ValueError, RecursionError):
        return None
    return read if all(one.role in ROLES and _has_known_parts(one) for one in read) else None


def _has_known_parts(message: Message) -> bool:
    return not message.media or (message.role != "assistant" and texts_and_images(message.media) is not None)


def parts_of(message: Message) -> list[str | ImageReference]:
    """Return the texts and images of a message of an exchange, in order; none if it has no images."""
    return (texts_and_images(message.media) or []) if message.media else []


def chat_content(message: Message) -> str | list[dict[str, Any]]:
    """Write the content of a message as chat completions have it: a text, or parts, with `media:<sha256>` as the URL of an image."""
    parts = parts_of(message)
    if not parts:
        return message.content or ""
    return [{"type": "text", "text": one} if isinstance(one, str) else _image_part(one) for one in parts]


def _image_part(image: ImageReference) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": REFERENCE + image.sha256}}


def sampled(sequence: TokenSequence, span: SequenceTurn) -> SampledTokens:
    """Cut the tokens of a turn out of its sequence."""
    (start, end), (_, stop) = span.prompt, span.completion
    mask = sequence.loss_mask[end:stop]
    return SampledTokens(
        prompt=sequence.token_ids[:end],
        added=sequence.token_ids[start:end],
        completion=sequence.token_ids[end:stop],
        logprobs=sequence.logprobs[end:stop] if any(mask) else [],
        mask=mask,
    )


def tools_of(sequence: TokenSequence, contexts: Mapping[str, Context]) -> list[dict[str, Any]]:
    """Return the tools that the first call of a sequence offered, in the form of chat completions."""
    context = contexts.get(sequence.turns[0].turn.id)
    listed = msgspec.json.decode(context.tools) if context is not None and context.tools is not None else None
    return [tool for tool in listed or () if isinstance(tool, dict)]


def without_messages(found: Sequence[TurnMessages]) -> list[str]:
    """Return the ids of the turns whose new messages are not kept."""
    return [exchange.turn.id for exchange in found if exchange.messages is None]

"""Conversations: the words of a sequence beside its tokens, for formats that hold messages.

A sequence is a line of turns. What a turn was asked is kept as its whole request, which repeats all that went before; a
format wants each message once. So a sequence is read as *exchanges*: what was said to the model since its last answer,
and what it answered. The first exchange of a sequence hears all of its request, replies of earlier sequences among it.

What the model answered stands in its turn as it was served, whatever the harness later made of it. Where the words are
not kept (media, text completions, requests that could not be read, torn records) an exchange says so; its tokens are there
all the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokencache.core.context import Context, Raw
from tokencache.core.lineage import SequenceTurn, TokenSequence
from tokencache.core.messages import Message
from tokencache.core.turn import Turn
from tokencache.dialects.chat.messages import read_message

SPEAKERS = frozenset({"system", "user", "assistant", "tool"})
"""Roles that every format has a place for (`developer` is read as `system`)."""


class TurnMessages(NamedTuple):
    """A turn of a sequence, and what had been said to the model since its last answer; `None` if that is not kept."""

    span: SequenceTurn
    heard: tuple[Message, ...] | None

    @property
    def turn(self) -> Turn:
        """The turn itself; its `served` is the answer."""
        return self.span.turn


class Sampled(NamedTuple):
    """The tokens of a turn as a trainer needs them.

    `prompt` are all ids that the model saw, `added` those of them that are not in the sequence before; `logprobs` has one
    value for each id of `completion`, or is empty where nothing can be trained.
    """

    prompt: list[int]
    added: list[int]
    completion: list[int]
    logprobs: list[float]


def exchanges(sequence: TokenSequence, contexts: Mapping[str, Context]) -> list[TurnMessages]:
    """Read a sequence as exchanges, one for each of its turns."""
    found: list[TurnMessages] = []
    before: Context | None = None
    for span in sequence.turns:
        context = contexts.get(span.turn.id)
        found.append(TurnMessages(span, _heard(context, before, first=not found)))
        before = context
    return found


def _heard(context: Context | None, before: Context | None, *, first: bool) -> tuple[Message, ...] | None:
    if context is None or not context.messages:
        return None
    if first:
        return _read(context.messages)
    if before is None:
        return None
    since = _read(context.messages[len(before.messages) :])
    # The messages of the turn before, its answer as the harness sent it back, and what is new.
    return since[1:] if since and since[0].role == "assistant" else None


def _read(raw: Sequence[Raw]) -> tuple[Message, ...] | None:
    """Read raw messages; `None` if one of them is not text, or not understood."""
    try:
        read = tuple(read_message(msgspec.json.decode(one)) for one in raw)
    except (ValueError, RecursionError):
        return None
    return None if any(one.media or one.role not in SPEAKERS for one in read) else read


def sampled(sequence: TokenSequence, span: SequenceTurn) -> Sampled:
    """The tokens of a turn within its sequence."""
    (start, end), (_, stop) = span.prompt, span.completion
    trained = any(sequence.loss_mask[end:stop])
    return Sampled(
        prompt=sequence.token_ids[:end],
        added=sequence.token_ids[start:end],
        completion=sequence.token_ids[end:stop],
        logprobs=sequence.logprobs[end:stop] if trained else [],
    )


def tools_of(sequence: TokenSequence, contexts: Mapping[str, Context]) -> list[dict[str, Any]]:
    """The tools that a sequence's first call offered, in the form of chat completions."""
    context = contexts.get(sequence.turns[0].turn.id)
    listed = msgspec.json.decode(context.tools) if context is not None and context.tools is not None else None
    return [tool for tool in listed or () if isinstance(tool, dict)]


def wordless(said: Sequence[TurnMessages]) -> list[str]:
    """The turns of which is not kept what was said to the model."""
    return [exchange.turn.id for exchange in said if exchange.heard is None]

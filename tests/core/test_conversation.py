"""What a conversation knows about its messages is the same whether they came at once or in pieces, and as counted one by one."""

import random

import pytest

from tokencache.core.chain import FIRST_ANSWER, FIRST_CALL, Conversation, build_conversation, extend
from tokencache.core.messages import Message, ToolCall, context_digest, digest, exact_digest

ROLES = ("system", "user", "assistant", "tool")


def random_message(rng: random.Random) -> Message:
    role = rng.choice(ROLES)
    calls = [ToolCall(f"call_{rng.random()}", "f", "{}") for _ in range(rng.choice((0, 0, 1, 3)))] if role == "assistant" else []
    return Message(role=role, content=str(rng.random()), calls=tuple(calls))


def in_pieces(rng: random.Random, messages: list[Message]) -> Conversation:
    conversation = build_conversation(b"context", [])
    while messages:
        size = rng.randint(1, 3)
        piece, messages = messages[:size], messages[size:]
        digests = [digest(m) if m.role == "assistant" else context_digest(m) for m in piece]
        conversation = extend(conversation, piece, digests, [exact_digest(m) for m in piece])
    return conversation


def first(places):
    return next(iter(places), None)


@pytest.mark.parametrize("seed", range(50))
def test_pieces_and_places(seed):
    rng = random.Random(seed)
    messages = [random_message(rng) for _ in range(rng.randint(0, 8))]
    conversation = build_conversation(b"context", messages)
    assert in_pieces(rng, messages) == conversation
    assert conversation.call_count == sum(len(message.calls) for message in messages)
    places = conversation.first_places
    for role in ROLES:
        assert places.get(role) == first(i for i, message in enumerate(messages) if message.role == role)
    assert places.get(FIRST_CALL) == first(i for i, message in enumerate(messages) if message.calls)
    asked = [message.role for message in messages].index("user") if "user" in places else len(messages)
    answers = (i for i, message in enumerate(messages) if message.role == "assistant" and i > asked)
    assert places.get(FIRST_ANSWER) == first(answers)

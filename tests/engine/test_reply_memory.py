"""What a long stream keeps of each token, in bytes that Python allocated; and its text is whole, however it is kept."""

import json
import tracemalloc

import pytest

from tokencache.dialects.completion_reader import CHOICE_BEGIN
from tokencache.engine.reply import AT_ONCE, Reply

TOKENS = 4_000
MOST_BYTES = 39
"""A token: 4 bytes for its id, 8 for its log probability, 16 for its step, its letters, and room for lists to grow."""


def chunk(n, **delta):
    logprobs = {"content": [{"token": "w", "logprob": -0.5 - n / 7, "bytes": None, "top_logprobs": []}]}
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None, "token_ids": [1000 + n]}
    written = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return json.dumps(written, separators=(",", ":")).encode()


def arguments(n):
    return chunk(n, tool_calls=[{"index": 0, "id": "a", "function": {"name": "", "arguments": f" w{n:04}"}}])


def word(n):
    return chunk(n, content=f" w{n:04}")


@pytest.mark.parametrize("write", [word, arguments])
def test_a_token_takes_few_bytes(write):
    reply, chunks = Reply(), [write(n) for n in range(TOKENS)]
    tracemalloc.start()
    try:
        for data in chunks:
            reply.later.append(data[data.find(CHOICE_BEGIN) :][:-2])
            if len(reply.later) >= AT_ONCE:
                reply.read_later()
        assert len(reply.choices[0].ids) == TOKENS
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size <= MOST_BYTES * TOKENS


@pytest.mark.parametrize("write", [word, arguments])
@pytest.mark.parametrize("count", [8, 9, 10, 130, 1_000])
def test_the_last_delta_of_a_long_text_can_be_taken_back(write, count):
    reply = Reply()
    for n in range(count):
        reply.add(write(n))
    reply.take_back_message(write(count - 1))
    message = reply.choices[0].message(with_reasoning=True)
    text = message.calls[0].arguments if write is arguments else message.content
    assert text == "".join(f" w{n:04}" for n in range(count - 1))

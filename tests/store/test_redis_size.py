"""Memory of a session in Redis: measured on a real server, with records as the proxy writes them."""

import json
import random
from array import array
from pydoc_data.topics import topics

import msgspec
from redis.asyncio import Redis

from tokencache.core import ids
from tokencache.core.context import Context, pack_context
from tokencache.core.messages import Message, ToolCall
from tokencache.core.turn import Tokens, Turn, hash_ids, hash_logprobs
from tokencache.store.base import Entry
from tokencache.store.encoding import pack
from tokencache.store.redis import RedisStore

TURNS, TAIL, COMPLETION = 200, 200, 200
TEXT = "".join(topics[name] for name in sorted(topics))


def prose(rng: random.Random) -> int:
    """A start for 800 characters, which are 200 tokens."""
    return rng.randrange(len(TEXT) - 800)


def served(rng: random.Random) -> Message:
    """Some prose, and a call with the content of a file as arguments."""
    at = prose(rng)
    arguments = json.dumps({"command": TEXT[at + 300 : at + 800], "timeout": rng.randrange(1000)})
    return Message("assistant", TEXT[at : at + 300], calls=(ToolCall(f"call_{rng.randbytes(12).hex()}", "bash", arguments),))


def line(rng: random.Random):
    prefix, parent = b"", None
    for n in range(TURNS):
        tail = ids.pack(rng.choices(range(151_936), k=TAIL))
        completion = ids.pack(rng.choices(range(151_936), k=COMPLETION))
        logprobs = array("f", (-rng.expovariate(3) for _ in range(COMPLETION))).tolist()
        shared, prompt = ids.count(prefix), prefix + tail
        prefix = prompt + completion
        turn = Turn(
            id=rng.randbytes(8).hex(),
            call=rng.randbytes(8).hex(),
            match="continue" if parent else "root",
            parent=parent,
            base=parent,
            shared=shared,
            prompt_tokens=ids.count(prompt),
            completion_tokens=COMPLETION,
            prefix_hash=hash_ids(prefix),
            completion_hash=hash_ids(completion),
            logprobs_hash=hash_logprobs(ids.pack_logprobs(logprobs)),
            served=served(rng),
            position_key=rng.randbytes(16),
            judged=rng.randbytes(8),
            before=rng.randbytes(12),
            finish_reason="tool_calls",
            stopped=True,
            model="Qwen/Qwen3-30B-A3B-Instruct-2507",
            dialect="chat",
            stream=True,
            messages=2 * n + 2,
            tools=12,
            sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 8192},
            created=1_790_000_000.123456 + n,
            seconds=1.5 + rng.random(),
        )
        at, parent = prose(rng), turn.id
        said = {"role": "assistant", "content": turn.served.content, "tool_calls": [msgspec.to_builtins(turn.served.calls[0])]}
        heard = Context([msgspec.Raw(json.dumps(one).encode()) for one in (said, {"role": "tool", "content": TEXT[at : at + 800]})])
        keys = (b"c" + rng.randbytes(16), b"r" + rng.randbytes(16))
        yield Entry(turn, Tokens(tail, completion, ids.pack_logprobs(logprobs)), keys, pack_context(heard, turn.served))


async def test_bytes_of_a_token(redis_server):
    store = RedisStore(redis_server.url)
    await store.open()
    entries = list(line(random.Random(1)))
    for entry in entries:
        begun = await store.begin("size", entry.turn.call, [])
        await store.commit("size", begun.epoch, entry.turn.call, [entry])
    used = 0
    async with Redis.from_url(redis_server.url) as client:
        async for key in client.scan_iter("tokencache:{size}*"):
            used += await client.memory_usage(key, samples=0)
    per_token = used / (TURNS * (TAIL + COMPLETION))
    head = sum(len(pack(entry.turn)) for entry in entries) / TURNS
    print(f"{used} bytes, {per_token:.2f} per token; a head is {head:.0f} bytes")
    assert await store.turns("size") == [entry.turn for entry in entries]
    assert per_token <= 9.8
    await store.close()

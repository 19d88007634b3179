"""Makes conversations of a given size, and the next turn of each (README.md).

Text is made of short words with line breaks and quotes between them, so that JSON has something to escape; no two messages are equal.
"""

import random
from typing import Any

import msgspec

WORDS = ("the", "file", "return", "self", "value", "import", '"name"', "error", "line\n", "None", "path", "->", "def", "of")
TURNS = 16
"""Calls of a session under load."""
_POOL_SIZE = 1 << 18
_POOL = " ".join(random.Random(_POOL_SIZE).choices(WORDS, k=_POOL_SIZE // 4))


def text(rng: random.Random, size: int) -> str:
    """A unique text: each begins with a number of its own, and continues from anywhere in a pool."""
    found = f"{rng.randrange(16**8):08x} "
    while len(found) < size:
        at = rng.randrange(len(_POOL) // 2)
        found += _POOL[at : at + size - len(found)]
    return found[:size]


def _entry(role: str, content: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"role": role, "content": content}))


class Talk:
    """A conversation that grows. `body` is the request as a harness would send it now.

    With `own_system`, its system prompt is its own. With `answered`, every second message after it is an assistant's that the client wrote.
    """

    def __init__(
        self, seed: str, *, size: int, messages: int, own_system: bool = False, answered: bool = False, **members: int | bool
    ) -> None:
        self._rng = random.Random(seed)
        self.members: dict[str, Any] = {"model": "mock", **members}
        each = max(8, (size - 90 - 45 * messages) * 100 // 104 // messages)
        roles = ["user", "assistant" if answered else "user"] * (messages // 2 - 1) + ["user"]
        self.entries = [_entry("system", text(self._rng if own_system else random.Random(each), each))]
        self.entries += [_entry(role, text(self._rng, each)) for role in roles]

    def body(self, members: dict[str, Any] | None = None) -> bytes:
        """The next request; with `members` in place of the conversation's own."""
        return msgspec.json.encode({"messages": self.entries, **(members or self.members)})

    def add_turn(self, reply: str, tail_bytes: int) -> None:
        """Adds the model's reply and the user's next message."""
        self.entries += [_entry("assistant", reply), _entry("user", text(self._rng, tail_bytes))]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a conversation's calls.

    `size`: bytes of a body, in `messages` messages; `tokens`: of a reply; `tail`: bytes of the user's next message; `chunks`: of a stream,
    each a token, one in each `pace_ms`; 0 if it is not streamed.
    """

    size: int = 1_000
    messages: int = 4
    tokens: int = 200
    tail: int = 800
    chunks: int = 0
    pace_ms: int = 1

    def talk(self, seed: str, turns: int = 0, **more: bool) -> Talk:
        """A conversation that has this size in the middle of so many turns; `more`: as `Talk` takes it."""
        grown = (self.tokens * 4 + self.tail + 100) * turns // 2
        streamed: dict[str, Any] = {"stream": True, "mock_pace_ms": self.pace_ms} if self.chunks else {}
        return Talk(seed, size=max(300, self.size - grown), messages=self.messages, mock_tokens=self.tokens, **streamed, **more)

    def streamed(self, chunks: int, pace_ms: int = 1) -> "Shape":
        """The same with a streamed reply, a token in each chunk."""
        return msgspec.structs.replace(self, tokens=chunks, chunks=chunks, pace_ms=pace_ms)


SMALL = Shape(tokens=16, tail=64)
LONG = Shape(size=141_000, messages=200)
LONGEST = Shape(size=1_000_000, messages=400)
NEW = Shape(size=1_200, messages=2)
"""A session that begins with nothing."""
SHAPES = {"1 KB": SMALL, "141 KB": LONG, "1 MB": LONGEST, "141 KB, 500 chunks of 10 ms": LONG.streamed(500, 10)}

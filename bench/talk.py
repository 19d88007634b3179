"""Makes conversations of a given size, and the next turn of each.

Text is made of short words with line breaks and quotes between them, so that JSON has something to escape; no two messages are equal.
A history begins with an even number of `messages`: a system prompt, which all conversations of a size share, then the user's. So every
assistant message is the model's, as in a real rollout.
"""

import random
from collections.abc import Iterator
from typing import Any

import msgspec

WORDS = ("the", "file", "return", "self", "value", "import", '"name"', "error", "line\n", "None", "path", "->", "def", "of")


def _pool(size: int) -> str:
    rng = random.Random(size)
    return " ".join(rng.choice(WORDS) for _ in range(size // 4))


_POOL = _pool(1 << 18)


def text(rng: random.Random, size: int) -> str:
    """A unique text: each begins with a number of its own, and continues from anywhere in a pool."""
    found = f"{rng.randrange(16**8):08x} "
    while len(found) < size:
        at = rng.randrange(len(_POOL) // 2)
        found += _POOL[at : at + size - len(found)]
    return found[:size]


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
        system = text(self._rng if own_system else random.Random(each), each)
        roles = ["user", "assistant" if answered else "user"] * (messages // 2 - 1) + ["user"]
        self.entries = [self._entry("system", system), *(self._entry(role, text(self._rng, each)) for role in roles)]

    @staticmethod
    def _entry(role: str, content: str) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode({"role": role, "content": content}))

    def body(self) -> bytes:
        return msgspec.json.encode({"messages": self.entries, **self.members})

    def add_turn(self, reply: str, tail_bytes: int) -> None:
        """Adds the model's reply and the user's next message."""
        self.entries.append(self._entry("assistant", reply))
        self.entries.append(self._entry("user", text(self._rng, tail_bytes)))


def names(what: str) -> Iterator[str]:
    """Session names, unique within a run."""
    n = 0
    while True:
        n += 1
        yield f"{what}-{n}"

"""Random sessions as records alone: turns and tokens, of any shape that a tree can have."""

import random

import msgspec

from tokencache.core import ids
from tokencache.core.turn import Tokens, Turn, hash_ids, hash_logprobs


class Forest:
    """Turns by hand: each continues a parent, or starts anew."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.tokens: dict[str, Tokens] = {}
        self.prefix: dict[str, bytes] = {}
        self.ground_truth: list[tuple[list[int], list[int], list[float]]] = []

    def add(self, prompt, completion, parent=None, *, base=None, match=None, marks=(), logprobs=None, **more):
        """Record a turn: `prompt` is all of it, or what comes behind the parent's prefix."""
        name = more.pop("id", f"t{len(self.turns)}")
        base = base or parent
        held = self.prefix[base] if base else b""
        packed = (self.prefix[parent] if parent else b"") + ids.pack(prompt)
        shared = ids.common_head(held, packed)
        own = ids.pack(completion)
        values = [-(i + 1) / 8 - len(self.turns) for i in range(len(completion))] if logprobs is None else logprobs
        kind = match or ("continue" if parent else "root")
        self.prefix[name] = packed + own
        turn = Turn(
            id=name,
            call=name,
            match=kind,
            parent=parent,
            base=base if shared else None,
            shared=shared,
            prompt_tokens=ids.count(packed),
            completion_tokens=len(completion),
            prefix_hash=hash_ids(packed + own),
            completion_hash=hash_ids(own),
            logprobs_hash=hash_logprobs(ids.pack_logprobs(values)),
            marks=marks,
            **more,
        )
        self.turns.append(turn)
        self.tokens[name] = Tokens(ids.tail(packed, shared), own, ids.pack_logprobs(values))
        self.ground_truth.append((ids.unpack(packed), completion, values))
        return name

    def change(self, name, **fields):
        """Break the record of one turn."""
        of_tokens = {k: v for k, v in fields.items() if k in {"delta", "completion", "logprobs"}}
        of_turn = {k: v for k, v in fields.items() if k not in of_tokens}
        self.tokens[name] = msgspec.structs.replace(self.tokens[name], **of_tokens)
        self.turns = [msgspec.structs.replace(t, **of_turn) if t.id == name else t for t in self.turns]
        return self


def grow(rng: random.Random) -> Forest:
    """Grow a forest: lines, retries, forks, edits that start anew over a shared head, turns that lack something."""
    forest = Forest()
    for _ in range(rng.randint(1, 14)):
        completion = [rng.randint(0, 4) for _ in range(rng.choice([0, 1, 2, 3]))]
        new = [rng.randint(0, 4) for _ in range(rng.randint(0, 3))]
        marks = tuple(m for m in ("aborted", "no-logprobs") if rng.random() < 0.15)
        logprobs = [] if "no-logprobs" in marks else None
        some = rng.choice(forest.turns) if forest.turns else None
        if some is None or rng.random() < 0.15:
            forest.add(new, completion, marks=marks, logprobs=logprobs, match=rng.choice(["root", "plain"]))
        elif rng.random() < 0.2:
            head = ids.unpack(forest.prefix[some.id])[: rng.randint(0, 6)]
            forest.add(head + new, completion, base=some.id, match="resplice", origin=some.id, marks=marks, logprobs=logprobs)
        else:
            last = forest.turns[-1] if rng.random() < 0.6 else some
            kind = "branch" if any(t.parent == last.id for t in forest.turns) else "continue"
            forest.add(new, completion, last.id, match=kind, marks=marks, logprobs=logprobs)
    return forest


def line(n: int = 3) -> Forest:
    """A session of one line."""
    forest = Forest()
    parent = None
    for i in range(n):
        parent = forest.add([i, 50, 51], [100 + i, 9], parent)
    return forest

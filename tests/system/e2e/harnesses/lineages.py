"""Reads from the engine's log which call's prompt extends which earlier call, token for token.

It does not use the proxy's data. A call *extends* an earlier one if its prompt begins with that call's prompt and all tokens sampled after
it. A call could do so if its prompt contains an answer of the model: it is a *follow-up*.
"""

from dataclasses import dataclass

MARKER = "EPISODE:"
OPENER = "<|im_start|>assistant"


@dataclass(frozen=True)
class Call:
    """One generation. `parent` is the index of the call that it extends; None if it extends none."""

    prompt: tuple
    sampled: tuple
    replies: int
    """How many replies the prompt contains."""
    parent: int | None

    @property
    def prefix(self):
        return self.prompt + self.sampled

    @property
    def follows_up(self):
        return self.replies > 0


def read(generations, decode):
    """The harness's own calls, in order; the proxy's own requests to the engine name no episode."""
    calls = []
    for prompt, sampled in generations:
        text = decode(prompt)
        if MARKER not in text:
            continue
        extended = [at for at, call in enumerate(calls) if tuple(prompt[: len(call.prefix)]) == call.prefix]
        parent = max(extended, key=lambda at: len(calls[at].prefix), default=None)
        calls.append(Call(tuple(prompt), tuple(sampled), text.count(OPENER) - 1, parent))
    return calls


def contiguous(calls):
    """How many follow-ups extend an earlier call, and how many there are."""
    follow_ups = [call for call in calls if call.follows_up]
    return sum(call.parent is not None for call in follow_ups), len(follow_ups)


def rendered(calls):
    """How many replies in all prompts are there as text: without the ids that were sampled."""
    kept = [sum(contains(call.prompt, sampled) for sampled in {one.sampled for one in calls[:at]}) for at, call in enumerate(calls)]
    return sum(call.replies for call in calls) - sum(kept)


def contains(ids, part):
    """Whether these ids contain that part without a gap."""
    return f" {' '.join(map(str, part))} " in f" {' '.join(map(str, ids))} "


def lines(calls):
    """The lengths of the lines that the calls form, longest first: each call continues its parent's line, or begins one."""
    line_of, lengths, continued = {}, [], set()
    for at, call in enumerate(calls):
        if call.parent is None or call.parent in continued:
            line_of[at] = len(lengths)
            lengths.append(1)
        else:
            line_of[at] = line_of[call.parent]
            lengths[line_of[at]] += 1
        continued.add(call.parent)
    return sorted(lengths, reverse=True)


def shared(one, other):
    """The number of ids that both begin with."""
    return next((at for at, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs), min(len(one), len(other)))

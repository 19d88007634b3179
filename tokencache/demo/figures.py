"""Computes the demo's figures: how much of some rollouts a trainer can use.

The definitions are the same with and without the proxy, and use only token ids. A rollout is the list of its turns. The *prefix* of a turn
is its prompt and completion.

================== ====================================================================================================
`turns`            model calls
`contiguous_turns` turns that are the first of their rollout, or whose prompt starts with the prefix of the turn before
`drifted_tokens`   for all other turns: the tokens of that prefix from the first one that the prompt does not repeat
`sequences`        runs of turns that extend one another: the parts of a rollout if it is cut wherever it breaks
`trainable_tokens` sampled tokens of each rollout's first run: all of them if it has one run, else those that remain if a
                   rollout must be one sequence, as trainers that assert contiguity (NeMo RL) require
================== ====================================================================================================

Without the proxy the ids come from the engine's ground truth, because a harness receives only text. With the proxy they come from the
trainer's API: runs are the exported sequences, and only tokens with loss mask 1 are trainable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rapidfuzz.distance import Prefix


@dataclass(frozen=True, slots=True)
class Generation:
    """The token ids of one model call: prompt, completion, and the log probabilities of the completion."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """The figures of some rollouts, as the module docstring defines them."""

    rollouts: int = 0
    turns: int = 0
    contiguous_turns: int = 0
    drifted_tokens: int = 0
    sequences: int = 0
    trainable_tokens: int = 0

    def as_json(self) -> dict[str, int]:
        """The figures by name."""
        return asdict(self)

    def __add__(self, other: "DemoFigures") -> "DemoFigures":
        ours, theirs = self.as_json(), other.as_json()
        return DemoFigures(**{name: ours[name] + theirs[name] for name in ours})


def drift(before: Generation, turn: Generation) -> int:
    """Count the tokens of `before`'s prefix from the first one that `turn`'s prompt does not repeat; 0 if it repeats all."""
    prefix = before.prompt + before.completion
    return len(prefix) - Prefix.similarity(prefix, turn.prompt)


def measure(rollout: Sequence[Generation]) -> DemoFigures:
    """Measure one rollout, given its turns in order."""
    lost = [drift(before, turn) for before, turn in pairwise(rollout)]
    breaks = [place for place, tokens in enumerate(lost, 1) if tokens]
    first_run = rollout[: breaks[0]] if breaks else rollout
    return DemoFigures(
        rollouts=1,
        turns=len(rollout),
        contiguous_turns=len(rollout) - len(breaks),
        drifted_tokens=sum(lost),
        sequences=len(breaks) + 1,
        trainable_tokens=sum(len(turn.completion) for turn in first_run),
    )


def exported_turns(trajectory: Mapping[str, Any]) -> list[Generation]:
    """Return the turns of an exported trajectory, in the order of their calls."""
    found = []
    for sequence in trajectory["sequences"]:
        ids, logprobs = sequence["token_ids"], sequence["logprobs"]
        for turn in sequence["turns"]:
            start, end = turn["completion"]
            found.append((turn["created"], Generation(ids[:start], ids[start:end], logprobs[start:end])))
    return [turn for _, turn in sorted(found, key=lambda pair: pair[0])]


def measure_exported(trajectory: Mapping[str, Any]) -> DemoFigures:
    """Measure one rollout as the proxy exports it, with its sequences and loss masks."""
    plain, sequences = measure(exported_turns(trajectory)), trajectory["sequences"]
    of_sequences = {"sequences": len(sequences), "trainable_tokens": sum(sequences[0]["loss_mask"]) if sequences else 0}
    return DemoFigures(**(plain.as_json() | of_sequences))


def disagreements(trajectory: Mapping[str, Any], ground_truth: Sequence[Generation], turns: int) -> list[str]:
    """List where an exported trajectory differs from the engine's ground truth of that session. An empty list proves that it is exact.

    Exported turns and entries of the ground truth must be equal one to one, in prompt ids, completion ids and log probabilities. Their
    number must be that of the harness's calls. The loss mask must be 1 for sampled tokens and 0 elsewhere. The proxy must report that the
    session is complete.
    """
    session, found = trajectory["session"], []
    left = list(ground_truth)
    for place, turn in enumerate(exported_turns(trajectory)):
        if turn in left:
            left.remove(turn)
        else:
            found.append(f"session {session}: exported turn {place} is not in the engine's ground truth")
    found += [f"session {session}: a call of {len(entry.prompt)} + {len(entry.completion)} tokens is not exported" for entry in left]
    if len(ground_truth) != turns:
        found.append(f"session {session}: the engine was called {len(ground_truth)} times, the harness made {turns} calls")
    for sequence in trajectory["sequences"]:
        sampled = [0] * len(sequence["token_ids"])
        for turn in sequence["turns"]:
            start, end = turn["completion"]
            sampled[start:end] = [1] * (end - start)
        if sampled != sequence["loss_mask"]:
            found.append(f"session {session}: the loss mask of sequence {sequence['id']} does not mark the sampled tokens")
    if not trajectory["complete"]:
        found.append(f"session {session}: incomplete: {[incident['kind'] for incident in trajectory['incidents']]}")
    return found

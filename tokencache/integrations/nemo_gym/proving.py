"""Proves the parents of captured calls by their token ids, where NeMo Gym did not recognize the text.

Gym finds the parent of a call by a hash of everything that the model wrote in its request. A harness that strips a text or renames a
call's id makes the call *unresolved*, and Gym masks its rollout, although the engine's prompt begins with the exact tokens of an earlier
call. `ProvingSource` looks at those tokens. It works with every source: Gym's own files, tokencache's stores (`capture`), or another.

Source: nemo-gym 0.7.0, `token_id_capture/protocols.py` (`TokenSource`) and `builder.py` (`_resolve_parent`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tokencache.core import ids
from tokencache.integrations.nemo_gym.gym_package import gym

PROVEN = "token-prefix"
"""The `parent_resolution_reason` of a call whose parent was proven here."""


class ProvingSource:
    """A `TokenSource` that proves unresolved parents when a rollout is frozen. What is stored does not change.

    The parent of an unresolved call becomes the recorded call whose prompt and completion are the longest beginning of its prompt. Gym's
    builder verifies that link again. Without such a call it stays unresolved. A call that Gym resolved or called a root stays as it is.

    Args:
        source: the source to wrap. Closing this source closes it.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    async def freeze(self, rollout_id: str) -> Any:
        """Freeze a rollout; returns the wrapped source's snapshot with the parents that its tokens prove."""
        snapshot = await self._source.freeze(rollout_id)
        return dataclasses.replace(snapshot, entries=tuple(prove(snapshot.entries)))

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Retire a snapshot, as the wrapped source does."""
        dropped: bool = await self._source.drop(rollout_id, snapshot_id=snapshot_id, version=version)
        return dropped

    async def close(self) -> None:
        """Close the wrapped source."""
        await self._source.close()


def prove(entries: Sequence[Any]) -> list[Any]:
    """Return the entries (`TokenEntry`), with a parent for each unresolved one whose prompt proves it."""
    if all(entry.parent_resolution != gym.ParentResolutionStatus.UNRESOLVED for entry in entries):
        return list(entries)
    generated = {entry.model_call_id for entry in entries if entry.generation_token_ids}
    sequences = {call: ids.pack(tokens) for call, tokens in cumulative(entries).items() if call in generated}
    proven = []
    for entry in entries:
        if entry.parent_resolution == gym.ParentResolutionStatus.UNRESOLVED:
            prompt = ids.pack(entry.prompt_token_ids)
            # Of several calls with the same tokens, all are right: Gym, too, takes the first of them.
            found = sorted((-len(tokens), call) for call, tokens in sequences.items() if prompt.startswith(tokens))
            if found:
                proof = {"parent_call_id": found[0][1], "parent_resolution_reason": PROVEN}
                entry = entry.model_copy(update=proof | {"parent_resolution": gym.ParentResolutionStatus.RESOLVED})  # noqa: PLW2901
        proven.append(entry)
    return proven


def cumulative(entries: Sequence[Any]) -> dict[str, list[int]]:
    """Return prompt and completion of each call whose digest confirms them, also where a prompt is stored as a delta (`delta_records`)."""
    by_call = {entry.model_call_id: entry for entry in entries}
    sequences: dict[str, list[int]] = {}
    for entry in entries:
        line: dict[str, Any] = {}
        at = entry
        while at is not None and at.model_call_id not in line and at.model_call_id not in sequences:
            line[at.model_call_id] = at
            at = by_call.get(at.parent_call_id) if at.prompt_is_delta else None
        for call, each in reversed(line.items()):
            before = sequences.get(each.parent_call_id) if each.prompt_is_delta else []
            if before is not None:
                tokens = [*before, *each.prompt_token_ids, *each.generation_token_ids]
                if gym.compute_digest(tokens) == each.digest:
                    sequences[call] = tokens
    return sequences

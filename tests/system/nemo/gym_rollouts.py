"""Calls of NeMo Gym's model server as its capture records them: the prompt of each begins with the tokens of the one before."""

from typing import Any

from tests.support.material import require_package

gym = require_package("nemo_gym", "tokencache.integrations.nemo_gym.gym_package").gym
QUESTION = [{"role": "user", "content": "What now?"}]
Status = gym.ParentResolutionStatus


class Rollout:
    """One conversation. `record` makes the record of its next call, as `commit_entry` of Gym does from what `resolve` returned."""

    def __init__(self, name: str, *, deltas: bool = False) -> None:
        self.name, self.items, self.tokens, self.calls, self.deltas = name, list(QUESTION), [1, 2, 3], 0, deltas

    def record(self, resolution: Any) -> Any:
        self.calls += 1
        prompt, call = [*self.tokens, 100 + self.calls], f"{self.name}-{self.calls}"
        entry = gym.TokenEntry(
            rollout_id=self.name,
            model_call_id=call,
            prompt_token_ids=prompt,
            generation_token_ids=[200 + self.calls, 7],
            generation_log_probs=[-0.1234567890123, -1e-17],
            output_items=[{"type": "message", "role": "assistant", "content": f"reply {call}"}],
            token_item_index=0,
            response_id=f"response-{call}",
        )
        gym.stamp_continuation(entry, self.items)
        self.tokens = gym.cumulative_tokens(entry)
        match = resolution.match
        if self.deltas and match is not None:
            entry.prompt_token_ids, entry.prompt_is_delta = prompt[len(match.cumulative_token_ids) :], True
        parent = match and match.model_call_id
        gym.stamp_lineage(entry, parent, parent_resolution=resolution.status, cumulative=self.tokens)
        self.items += [*entry.output_items, {"role": "user", "content": f"and {call}?"}]
        return entry


def resolution(status: Any, parent: Any = None) -> Any:
    """What a resolver returned for a call; `parent` is the record that it found."""
    match = parent and gym.LineageMatch(parent.model_call_id, tuple(gym.cumulative_tokens(parent)), parent.digest)
    return gym.LineageResolution(status, match=match)


def delivered(entries: Any) -> list[int] | None:
    """The tokens of the one chain that Gym's builder makes of these records; `None` if it leaves a call out."""
    built = gym.prefix_merging(list(entries))
    if len(built.chains) != 1 or built.quarantined or built.notes.unresolved_parent_calls:
        return None
    last = built.chains[0].links[-1].entry
    return gym.cumulative_tokens(last)

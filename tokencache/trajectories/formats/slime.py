"""slime and miles: `Sample`, as its `from_dict` reads it.

Source: github.com/THUDM/slime `slime/utils/types.py` at 0d234f3e and github.com/radixark/miles `miles/utils/types.py` at
002ce70c. miles began as slime; all that is written here is called the same and means the same in both. Neither is on PyPI.

===================  =====================  ===========================================================================
`prompt`             [message] or `""`      the messages that the first turn answered, as in chat completions; `""`
                                            where they are not kept (media)
`tokens`             [int]                  prompt and response
`response_length`    int                    how many of them, at the end, are the response
`loss_mask`          [int]                  over the response only; 1: sampled here
`rollout_log_probs`  [float]                over the response only
`status`             str                    `completed`, `truncated` (token limit) or `aborted`: of the last turn
`reward`             `None`                 the trainer's
`weight_versions`    [str]                  one for each span that the engine named, in order; miles reads them as integers
`session_id`         str                    the session
`metadata`           object                 our labels under `tokencache`: slime reads names like `raw_reward` there itself
===================  =====================  ===========================================================================

`index`, `group_index` and `label` stay the trainer's. `response`, the text, is left out: the trainer's tokenizer reads it
from the tokens. A custom generate function may return a list of samples for one prompt, and slime flattens it
(`slime/ray/rollout.py`); a sample of which nothing was sampled (`response_length` 0) has to be left out there. Both normalise
rewards over groups of equal size: who gives more than one sample for a rollout needs a `--custom-reward-post-process-path`.
"""

from typing import Any

import msgspec

from tokencache.core.lineage import TokenSequence
from tokencache.trajectories.formats.rows import Row, rows_of, session_object
from tokencache.trajectories.rollout import Rollout

STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}
"""How a reply ended, in the words of `Sample.Status`."""


def slime(rollout: Rollout) -> dict[str, Any]:
    """Write a rollout's sequences as dicts for `Sample.from_dict`."""
    return {**session_object(rollout), "samples": [_sample(rollout, row) for row in rows_of(rollout)]}


def _sample(rollout: Rollout, row: Row) -> dict[str, Any]:
    return {
        "prompt": _prompt(rollout, row.sequence),
        "tokens": row.sequence.token_ids,
        "response_length": len(row.response_ids),
        "loss_mask": row.response_mask,
        "rollout_log_probs": row.response_logprobs,
        "status": STATUS[row.ending],
        "reward": None,
        "weight_versions": _weight_versions(row.sequence),
        "session_id": rollout.session,
        "metadata": {"tokencache": row.labels},
    }


def _prompt(rollout: Rollout, sequence: TokenSequence) -> list[Any] | str:
    context = rollout.contexts.get(sequence.turns[0].turn.id)
    return [msgspec.json.decode(message) for message in context.messages] if context else ""


def _weight_versions(sequence: TokenSequence) -> list[str]:
    """The versions in the order of their spans, where spans name one as vLLM's do."""
    spans = (span for one in sequence.turns for span in one.turn.versions)
    return [str(span["version"]) for span in spans if isinstance(span, dict) and "version" in span]

"""Writes rollouts for slime and miles: dicts that `Sample.from_dict` reads.

Sources: github.com/THUDM/slime `slime/utils/types.py` at 0d234f3e, which is not on PyPI, and miles-rl 0.0.2 on PyPI
(github.com/radixark/miles), `miles/utils/types.py`. miles started as slime; all members here have the same names and meanings in both.

===================  =====================  ===========================================================================
`prompt`             [message] or `""`      the request messages of the first turn, as in chat completions, with `media:<sha256>` in
                                            place of the bytes of images; `""` if they are not kept
`tokens`             [int]                  prompt and response
`response_length`    int                    number of tokens at the end that are the response
`loss_mask`          [int]                  over the response only; 1: sampled here
`rollout_log_probs`  [float]                over the response only
`status`             str                    `completed`, `truncated` (token limit) or `aborted`: of the last turn
`remove_sample`      bool                   whether the rollout is invalid: the trainer then masks the sample, as its `loss_mask` does
`reward`             float or `None`        of the sequence, otherwise of the session; `None` if none was given: the trainer sets it
`weight_versions`    [str]                  one for each span that the engine named, in order. miles reads them as integers
`session_id`         str                    the session
`metadata`           object                 our labels under `tokencache`: slime itself reads names such as `raw_reward` there
===================  =====================  ===========================================================================

The trainer sets `index`, `group_index` and `label`. The text member `response` is left out: the trainer's tokenizer decodes the tokens. A
custom generate function may return a list of samples for one prompt; slime flattens it (`slime/ray/rollout.py`). It must leave out samples
without sampled tokens (`response_length` 0). Both trainers normalize rewards over groups of equal size, and count samples that are removed.
So more than one sample for a rollout, or an invalid rollout, needs a `--custom-reward-post-process-path` (`slime/ray/rollout.py`,
`_post_process_rewards`).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.core.lineage import TokenSequence
from tokencache.core.turn import TurnMark
from tokencache.trajectories.formats.rows import ExportedRow, ExportedTokens, Row, rows_of, session_object
from tokencache.trajectories.rollout import Rollout

STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}
"""`Sample.Status` for each way a reply can end."""


def slime(rollout: Rollout) -> dict[str, Any]:
    """Write each sequence of a rollout as a dict for `Sample.from_dict`."""
    return {**session_object(rollout), "samples": [_sample(rollout, row) for row in rows_of(rollout)]}


def read_slime(row: Mapping[str, Any]) -> list[ExportedRow]:
    """Read one row back."""
    at = len(row["tokens"]) - row["response_length"]
    tokens = ExportedTokens(row["tokens"][:at], row["tokens"][at:], row["loss_mask"], row["rollout_log_probs"])
    return [ExportedRow(row["metadata"]["tokencache"], tokens)]


def _sample(rollout: Rollout, row: Row) -> dict[str, Any]:
    return {
        "prompt": _prompt(rollout, row.sequence),
        "tokens": row.sequence.token_ids,
        "response_length": len(row.response_ids),
        "loss_mask": row.response_mask,
        "rollout_log_probs": row.response_logprobs,
        "status": STATUS[row.ending],
        "reward": row.reward,
        "remove_sample": not rollout.valid,
        "weight_versions": _weight_versions(row.sequence),
        "session_id": rollout.session,
        "metadata": {"tokencache": row.labels},
    }


def _prompt(rollout: Rollout, sequence: TokenSequence) -> list[Any] | str:
    context = rollout.contexts.get(sequence.turns[0].turn.id)
    try:
        return [msgspec.json.decode(message) for message in context.messages] if context else ""
    except (ValueError, RecursionError):  # a message that is not valid Unicode, or nested too deeply
        return ""


def _weight_versions(sequence: TokenSequence) -> list[str]:
    """Return the versions in the order of their spans, if spans name one as those of vLLM do. What a fork shares is its prompt."""
    turns = (one.turn for one in sequence.turns if TurnMark.SHARED not in one.turn.marks)
    spans = (span for turn in turns for span in turn.versions)
    return [str(span["version"]) for span in spans if isinstance(span, dict) and "version" in span]

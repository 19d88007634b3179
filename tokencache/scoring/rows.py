"""The rows of a file of scores: one for each sequence, with what was recorded and what was recomputed side by side.

`session`, `sequence`  which sequence of which rollout
`token_ids`            its tokens
`loss_mask`            1 for each token that the policy sampled in this sequence
`logprobs`             the recorded log probabilities: of the tokens with mask 1; 0.0 for all others
`score`                the recomputed ones, of all tokens but the first, which has 0.0; null if the engine refused the sequence
`score_model`          the model that recomputed them
`score_version`        the engine's label of its weights (`/weight_info`), if it has one
`score_top_ids`,       with `--top`: for each token the likeliest tokens at its place, and their log probabilities
`score_top_logprobs`
`score_error`          why `score` is null
`media_error`          why a row with images or other media is never scored: the engine would not get them

With edited messages (`--edit`) there is a row for each turn: `token_ids` are its edited prompt and its reply. It has also

`turn`                 the turn
`edits`                the indexes of the edits that changed its prompt; empty if none has a place in it
`edit_error`           why there is no proven prompt; then the row has no tokens and is never scored

With `--name N` the columns of `score` are called `score_N`, `score_N_model`, and so on: one file holds the scores of several engines.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import xxhash
from msgspec import Meta

from tokencache.core import ids
from tokencache.scoring.request import MOST_TOP, Scores, unscorable
from tokencache.trajectories.values import ScoredTurn, Trajectory

Row = dict[str, Any]

_PLAIN = ("session", "sequence", "token_ids", "loss_mask", "logprobs")
_Top = Annotated[int, Meta(ge=0, le=MOST_TOP)]
_PARTS = ("model", "version", "top_ids", "top_logprobs", "error")


class Wanted(msgspec.Struct, frozen=True):
    """What is to be computed; the described members are options of `tokencache score`. `version`: the engine's label of its weights."""

    name: Annotated[str, Meta(description="Name of the scores: column score_NAME.")] = ""
    model: Annotated[str, Meta(description="Model at the engine. The default is its only one.")] = ""
    top: Annotated[_Top, Meta(description="Also the K likeliest tokens at each place.", extra={"metavar": "K"})] = 0
    version: str = ""


def rows_of_value(value: Any) -> Iterator[Row]:
    """Return the rows of a native rollout, or the row of a file of scores itself, given as decoded JSON.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, Mapping) and "sequences" not in value and all(name in value for name in _PLAIN):
        yield dict(value)
        return
    rollout = msgspec.convert(value, Trajectory)
    for sequence in rollout.sequences:
        own = (rollout.session, sequence.id, sequence.token_ids, sequence.loss_mask, sequence.logprobs)
        error = unscorable(sequence)
        yield dict(zip(_PLAIN, own, strict=True)) | ({"media_error": error} if error else {})


def row_of_turn(session: str, turn: ScoredTurn) -> Row:
    """Return the row of a turn under edits."""
    names = {"session": session, "sequence": turn.sequence, "turn": turn.turn, "edits": turn.edits}
    if turn.refused:
        return {**names, "token_ids": [], "loss_mask": [], "logprobs": [], "edit_error": f"{turn.refused}: {turn.error}"}
    prompt = turn.prompt_token_ids
    mask, logprobs = [*[0] * len(prompt), *turn.loss_mask], [*[0.0] * len(prompt), *turn.logprobs]
    return {**names, "token_ids": [*prompt, *turn.token_ids], "loss_mask": mask, "logprobs": logprobs}


def key_of(row: Row) -> str:
    """Return what identifies a row: its session, its sequence, its turn if it has one, and a hash of its tokens."""
    turn = f"/{row['turn']}" if "turn" in row else ""
    return f"{row['session']}/{row['sequence']}{turn}/{xxhash.xxh3_128_hexdigest(ids.pack(row['token_ids']))}"


def column(name: str) -> str:
    """Return the column of scores with a name; `""` is the unnamed one."""
    return f"score_{name}" if name else "score"


def scored(row: Row, wanted: Wanted, scores: Scores) -> Row:
    """Return a row with its scores."""
    at = column(wanted.name)
    version = {f"{at}_version": wanted.version} if wanted.version else {}
    more = {f"{at}_top_ids": scores.top_ids, f"{at}_top_logprobs": scores.top_logprobs} if scores.top_ids else {}
    return {**_without(row, at), at: scores.logprobs, f"{at}_model": wanted.model, **version, **more}


def unscored(row: Row, wanted: Wanted, error: str) -> Row:
    """Return a row that the engine refused."""
    at = column(wanted.name)
    return {**_without(row, at), at: None, f"{at}_model": wanted.model, f"{at}_error": error}


def _without(row: Row, at: str) -> Row:
    columns = {at, *(f"{at}_{part}" for part in _PARTS)}
    return {name: value for name, value in row.items() if name not in columns}

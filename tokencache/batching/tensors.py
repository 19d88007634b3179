"""Pads or packs rows to arrays: numpy, or torch tensors with `as_torch`.

==============  ===============================================================================================================
`pad`           one line for each row, filled to the same length
`pack`          rows one after the other, without filling, for attention with `cu_seqlens` (FlashAttention's varlen functions)
`flatten`       a prefix forest as one line, in which each token attends to its ancestors only (`forest`)
==============  ===============================================================================================================

In all arrays an entry belongs to the token at its place, unshifted: `loss_mask[i]` is whether token i is trained, `logprobs[i]` the log
probability (natural logarithm) with which it was sampled, `advantages[i]` its advantage. The logits that predict token i are those of the
token before it: of i - 1 within a row, of `parents[i]` in a forest.

No row is ever shortened: a row that is too long raises an error. Limit the length when you fetch trajectories (`max_length`), which cuts
after whole turns and reports what it left out.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tokencache.batching.forest import PrefixForest, uneven
from tokencache.batching.selection import TrainingRow
from tokencache.errors import extra_missing

try:
    import numpy as np
    from numpy.typing import NDArray
except ImportError as error:
    raise ImportError(extra_missing("tokencache.batching.tensors", "batching", error.name)) from None

Advantages = Sequence[float] | Sequence[Sequence[float]]
"""One number for each row, which holds for all its trained tokens; or for each row one number for each of its tokens."""


class PaddedRows(NamedTuple):
    """Rows as arrays of shape (rows, length).

    Attributes:
        token_ids, position_ids: int64. `attention_mask`: bool, false on padding. `loss_mask`: bool.
        logprobs, advantages: float32, 0.0 where `loss_mask` is false.
    """

    token_ids: NDArray[np.int64]
    attention_mask: NDArray[np.bool_]
    position_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]


class PackedRows(NamedTuple):
    """Rows one after the other, as arrays of shape (tokens,).

    Attributes:
        token_ids, position_ids: int64. The positions of each row begin with 0.
        loss_mask: bool. `logprobs`, `advantages`: float32, 0.0 where `loss_mask` is false.
        cu_seqlens: int32, shape (rows + 1,): where each row begins, and the number of tokens.
        rows: int64, shape (rows,): the place of each row in the argument of `pack`.
    """

    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    cu_seqlens: NDArray[np.int32]
    rows: NDArray[np.int64]


class FlatForest(NamedTuple):
    """A prefix forest as arrays of shape (tokens,).

    Attributes:
        token_ids, position_ids: int64. The position of a token is that in its rows.
        parents: int64: the token before each token; -1 for the first token of a tree.
        ends: int64: token q attends to token k exactly if `k <= q < ends[k]`.
        loss_mask: bool. `logprobs`, `advantages`: float32, 0.0 where `loss_mask` is false.
    """

    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    parents: NDArray[np.int64]
    ends: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]


def pad(rows: Sequence[TrainingRow], advantages: Advantages | None = None, *, pad_id: int = 0, left: bool = False) -> PaddedRows:
    """Pad rows to the length of the longest one, at the right or at the left.

    Padding has the token `pad_id`, position 0 and false masks. Without `advantages` all are 0.0.

    Raises:
        ValueError: advantages do not fit the rows, the lists of a row have different lengths, or it begins with a trained token, which no
            logits predict.
    """
    spread = _checked(rows, advantages)
    size = max((len(row.sequence.token_ids) for row in rows), default=0)
    shape = (len(rows), size)
    made = PaddedRows(
        token_ids=np.full(shape, pad_id, np.int64),
        attention_mask=np.zeros(shape, np.bool_),
        position_ids=np.zeros(shape, np.int64),
        loss_mask=np.zeros(shape, np.bool_),
        logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
    )
    for n, row in enumerate(rows):
        own = len(row.sequence.token_ids)
        place = (n, slice(size - own, size) if left else slice(own))
        made.token_ids[place] = row.sequence.token_ids
        made.attention_mask[place] = True
        made.position_ids[place] = np.arange(own)
        made.loss_mask[place] = row.sequence.loss_mask
        made.logprobs[place] = row.sequence.logprobs
        made.advantages[place] = spread[n]
    return made


def pack(rows: Sequence[TrainingRow], advantages: Advantages | None = None, *, max_tokens: int | None = None) -> list[PackedRows]:
    """Pack rows one after the other.

    Args:
        rows: the rows.
        advantages: see `Advantages`. Without them all are 0.0.
        max_tokens: the number of tokens that a pack may have. Rows are put into as few packs as a simple rule finds: longest rows first,
            each into the first pack with room. Without it there is one pack, in the order of the rows.

    Raises:
        ValueError: a row has more than `max_tokens` tokens, advantages do not fit the rows, the lists of a row have different lengths, or
            it begins with a trained token, which no logits predict.
    """
    spread = _checked(rows, advantages)
    sizes = [len(row.sequence.token_ids) for row in rows]
    return [_pack(rows, spread, places) for places in (_fill(rows, sizes, max_tokens) if max_tokens is not None else [range(len(rows))])]


def _fill(rows: Sequence[TrainingRow], sizes: list[int], most: int) -> list[list[int]]:
    """Divide rows into packs of at most `most` tokens; returns the places of the rows of each pack."""
    packs: list[list[int]] = []
    left: list[int] = []
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        if sizes[n] > most:
            raise ValueError(
                f"{rows[n]} has {sizes[n]} tokens, a pack may have {most}: drop it, or fetch trajectories with max_length={most}"
            )
        at = next((at for at, free in enumerate(left) if free >= sizes[n]), len(packs))
        if at == len(packs):
            packs.append([])
            left.append(most)
        packs[at].append(n)
        left[at] -= sizes[n]
    return packs


def _pack(rows: Sequence[TrainingRow], spread: list[list[float]], places: Iterable[int]) -> PackedRows:
    places = list(places)
    chosen = [rows[n].sequence for n in places]
    starts = np.cumsum([0, *(len(one.token_ids) for one in chosen)])
    return PackedRows(
        token_ids=_joined([one.token_ids for one in chosen], np.int64),
        position_ids=_joined([range(len(one.token_ids)) for one in chosen], np.int64),
        loss_mask=_joined([one.loss_mask for one in chosen], np.bool_),
        logprobs=_joined([one.logprobs for one in chosen], np.float32),
        advantages=_joined([spread[n] for n in places], np.float32),
        cu_seqlens=starts.astype(np.int32),
        rows=np.array(places, np.int64),
    )


def flatten(forest: PrefixForest, advantages: Advantages | None = None) -> FlatForest:
    """Write a prefix forest as arrays. `advantages` are those of the rows from which it was built, in the same order.

    Raises:
        ValueError: advantages do not fit the rows, or a row begins with a trained token, which no logits predict.
    """
    rows = forest.rows()
    spread = _spread([(row.loss_mask, f"session {row.session}, sequence {row.sequence}") for row in rows], advantages)
    values = np.zeros(len(forest.token_ids), np.float32)
    for n, own in enumerate(spread):
        path = np.array([i for start, end in forest.ranges(n) for i in range(start, end)], np.int64)
        owned = path[np.array(rows[n].loss_mask, np.bool_)]
        values[owned] = np.array(own, np.float32)[np.array(rows[n].loss_mask, np.bool_)]
    return FlatForest(
        token_ids=np.array(forest.token_ids, np.int64),
        position_ids=np.array(forest.positions, np.int64),
        parents=np.array(forest.parents, np.int64),
        ends=np.array(forest.ends, np.int64),
        loss_mask=np.array(forest.loss_mask, np.bool_),
        logprobs=np.array(forest.logprobs, np.float32),
        advantages=values,
    )


def tree_mask(flat: FlatForest) -> NDArray[np.bool_]:
    """Return the attention mask of a forest, shape (tokens, tokens): whether the token of a line attends to that of a column.

    It has the square of the number of tokens. For large forests, write the same condition into a kernel, for example as the `mask_mod` of
    PyTorch's FlexAttention: `lambda b, h, q, k: (k <= q) & (q < ends[k])`.
    """
    place = np.arange(len(flat.ends))
    query, key = place[:, None], place[None, :]
    mask: NDArray[np.bool_] = (key <= query) & (query < flat.ends[None, :])
    return mask


def as_torch(arrays: NamedTuple) -> dict[str, Any]:
    """Return arrays as torch tensors, by name. They share their memory with the arrays. Raises `ImportError` if torch is not installed."""
    import torch  # noqa: PLC0415  # optional

    return {name: torch.from_numpy(value) for name, value in arrays._asdict().items()}


def _joined(lists: Sequence[Sequence[float]], kind: type) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, kind), *(np.array(one, kind) for one in lists)])


def _checked(rows: Sequence[TrainingRow], advantages: Advantages | None) -> list[list[float]]:
    for row in rows:
        if wrong := uneven(row.sequence):  # packed, a list that is too short would shift all rows after it
            raise ValueError(f"{row}: {wrong}")
    return _spread([(row.sequence.loss_mask, str(row)) for row in rows], advantages)


def _spread(masks: Sequence[tuple[list[int], str]], advantages: Advantages | None) -> list[list[float]]:
    """Return one advantage for each token of each row: 0.0 where its mask is 0. `masks` also has the name of each row."""
    given: Sequence[Any] = [0.0] * len(masks) if advantages is None else advantages
    if len(given) != len(masks):
        raise ValueError(f"{len(given)} advantages for {len(masks)} rows")
    spread = []
    for (mask, name), one in zip(masks, given, strict=True):
        values = list(one) if isinstance(one, Sequence) or np.ndim(one) else [one] * len(mask)  # also arrays of NumPy and torch
        if len(values) != len(mask):
            raise ValueError(f"{name}: {len(values)} advantages for {len(mask)} tokens")
        if not all(map(math.isfinite, values)):
            raise ValueError(f"{name}: an advantage is not a finite number")
        if mask and mask[0]:
            raise ValueError(f"{name}: its first token is trained, but no logits predict the first token of a row")
        spread.append([value if trained else 0.0 for value, trained in zip(values, mask, strict=True)])
    return spread

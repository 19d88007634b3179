"""Checks the rows of any export format, one line of a file at a time. Each format knows its rows (`registry.Format`).

====================================  ===========================================================================================
`native`                              all checks of `verify`, and the digest
verl, slime, miles, TRL, SkyRL,       `aligned`, `trained` and `hashes` of `verify`, and the digest: a row holds one sequence with the
Tinker                                hashes of its turns (a row of SkyRL holds all sequences)
NeMo Gym, verifiers, prime-rl, ATIF   the digest: their tokens are spread over messages
====================================  ===========================================================================================

A row that an older version wrote has neither digest nor hashes, and is not checked.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tokencache.trajectories.digest import digest_of, has_lost_digest, recorded_digest
from tokencache.trajectories.formats.registry import FORMATS
from tokencache.trajectories.formats.rows import ExportedRow, ExportedTokens
from tokencache.trajectories.values import Sequence, Trajectory
from tokencache.trajectories.verify import CheckFailure, verify, verify_sequence


class CheckedRow(NamedTuple):
    """The result for one line of a file.

    Attributes:
        session: the name of its session; `""` if it is unknown.
        failures: the failed checks.
        parts: the session and sequence of each row that it holds; the sequence is `""` for a whole session.
        trajectory: the rollout, if it is a native one that can be read.
        turns, trainable_tokens: what it holds.
        has_digest: whether it has a digest.
    """

    session: str
    failures: list[CheckFailure]
    parts: tuple[tuple[str, str], ...] = ()
    trajectory: Trajectory | None = None
    turns: int = 0
    trainable_tokens: int = 0
    has_digest: bool = False


def verify_row(value: Any) -> CheckedRow:
    """Check a rollout or row of any format, given as decoded JSON. No value raises an exception."""
    if not isinstance(value, Mapping):
        return CheckedRow("", [CheckFailure(session="", check="readable", words="is no JSON object")])
    form = next((one for one in FORMATS.values() if one.member and one.member in value), None)
    if form is None:
        return CheckedRow("", [CheckFailure(session="", check="readable", words="is no row of a format of tokencache")])
    try:
        found = _rows(form.read(value)) if form.read is not None else _native(value)
    except (ValueError, LookupError, TypeError, AttributeError) as why:
        session = str(value.get("session", ""))
        return CheckedRow(session, [CheckFailure(session=session, check="readable", words=f"cannot be read: {why}")])
    recorded = recorded_digest(value)
    if has_lost_digest(value) or (recorded is not None and recorded != digest_of(value)):
        words = "was changed after it was exported: its digest is missing or another one"
        found.failures.append(CheckFailure(session=found.session, check="digest", words=words))
    return found._replace(has_digest=recorded is not None)


def _native(value: Mapping[str, Any]) -> CheckedRow:
    rollout = msgspec.convert(value, Trajectory)
    return CheckedRow(rollout.session, verify(rollout), ((rollout.session, ""),), rollout, *_counts(rollout.sequences))


def _rows(rows: list[ExportedRow]) -> CheckedRow:
    checked = [
        (sequence, not row.labels.get("valid", True) or (sequence.has_unplaced_media and not any(sequence.loss_mask)))
        for row in rows
        if row.tokens is not None and all("completion_hash" in turn for turn in row.labels["turns"])
        for sequence in [_sequence(row.labels, row.tokens)]
    ]
    sequences = [sequence for sequence, _ in checked]
    parts = tuple([(str(row.labels["session"]), str(row.labels.get("id", ""))) for row in rows])
    session = parts[0][0] if parts else ""
    failures = [
        msgspec.structs.replace(one, session=session) for sequence, masked in checked for one in verify_sequence(sequence, masked=masked)
    ]
    return CheckedRow(session, failures, parts, None, *_counts(sequences))


def _sequence(labels: Mapping[str, Any], tokens: ExportedTokens) -> Sequence:
    before = len(tokens.prompt_ids)
    members = {
        "token_ids": [*tokens.prompt_ids, *tokens.response_ids],
        "loss_mask": [0] * before + tokens.response_mask,
        "logprobs": [0.0] * before + tokens.response_logprobs,
    }
    return msgspec.convert({**labels, **members}, Sequence)


def _counts(sequences: list[Sequence]) -> tuple[int, int]:
    """Count turns and trainable tokens."""
    return sum(len(sequence.turns) for sequence in sequences), sum(sum(sequence.loss_mask) for sequence in sequences)

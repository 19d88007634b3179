"""Checks the rows of any export format, one line of a file at a time.

====================================  ===========================================================================================
`native`                              all checks of `verify`, and the digest
verl, slime, miles, TRL, SkyRL,       `aligned`, `trained` and `hashes` of `verify`, and the digest: a row holds one sequence with the
Tinker                                hashes of its turns (a row of SkyRL holds all sequences)
NeMo Gym, verifiers, prime-rl, ATIF   the digest: their tokens are spread over messages
====================================  ===========================================================================================

A row that an older version wrote has neither digest nor hashes, and is not checked.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tokencache.trajectories.digest import digest_of, has_lost_digest, recorded_digest
from tokencache.trajectories.values import Sequence, Trajectory
from tokencache.trajectories.verify import CheckFailure, verify, verify_sequence


class CheckedRow(NamedTuple):
    """The result for one line of a file.

    Attributes:
        session: the name of its session; `""` if it is unknown.
        failures: the failed checks.
        trajectory: the rollout, if it is a native one that can be read.
        turns, trainable_tokens: what it holds.
        has_digest: whether it has a digest.
    """

    session: str
    failures: list[CheckFailure]
    trajectory: Trajectory | None = None
    turns: int = 0
    trainable_tokens: int = 0
    has_digest: bool = False


def verify_row(value: Any) -> CheckedRow:
    """Check a rollout or row of any format, given as decoded JSON. No value raises an exception."""
    if not isinstance(value, Mapping):
        return CheckedRow("", [CheckFailure(session="", check="readable", words="is no JSON object")])
    reader = next((read for member, read in _READERS.items() if member in value), None)
    if reader is None:
        return CheckedRow("", [CheckFailure(session="", check="readable", words="is no row of a format of tokencache")])
    try:
        found = reader(value)
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
    return CheckedRow(rollout.session, verify(rollout), rollout, *_counts(rollout.sequences))


def _verl(row: Mapping[str, Any]) -> CheckedRow:
    labels = row["extra_fields"]["tokencache"]
    return _rows([(labels, row["prompt_ids"], row["response_ids"], row["response_mask"], row["response_logprobs"])])


def _slime(row: Mapping[str, Any]) -> CheckedRow:
    at = len(row["tokens"]) - row["response_length"]
    labels = row["metadata"]["tokencache"]
    return _rows([(labels, row["tokens"][:at], row["tokens"][at:], row["loss_mask"], row["rollout_log_probs"])])


def _trl(row: Mapping[str, Any]) -> CheckedRow:
    return _rows([(row["tokencache"], row["prompt_ids"], row["completion_ids"], row["env_mask"], row["logprobs"])])


def _skyrl(value: Mapping[str, Any]) -> CheckedRow:
    out = value["generator_output"]
    members = ("tokencache", "prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    return _rows(list(zip(*(out[name] for name in members), strict=True)))


def _tinker(row: Mapping[str, Any]) -> CheckedRow:
    """The target of a token is the token after it, so the first token has no mask."""
    inputs = row["loss_fn_inputs"]
    tokens = [token for chunk in row["model_input"]["chunks"] for token in chunk["tokens"]]
    if tokens[1:] != inputs["target_tokens"]["data"][:-1]:
        raise ValueError("a target is not the token after its place")
    mask = [int(value) for value in inputs["mask"]["data"]]
    return _rows([(row["tokencache"], tokens[:1], inputs["target_tokens"]["data"], mask, inputs["logprobs"]["data"])])


def _digest_only(labels: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], CheckedRow]:
    def read(value: Mapping[str, Any]) -> CheckedRow:
        return CheckedRow(str(labels(value)["session"]), [])

    return read


_READERS: dict[str, Callable[[Mapping[str, Any]], CheckedRow]] = {
    "sequences": _native,
    "response_ids": _verl,
    "rollout_log_probs": _slime,
    "env_mask": _trl,
    "generator_output": _skyrl,
    "loss_fn_inputs": _tinker,
    "responses_create_params": _digest_only(lambda row: row["tokencache"]),
    "nodes": _digest_only(lambda row: row["info"]["tokencache"]),
    "steps": _digest_only(lambda row: row["extra"]),
}
"""A member that only the rows of one format have, and the function that checks these rows."""

_Parts = tuple[Mapping[str, Any], list[int], list[int], list[int], list[float]]
"""Labels, tokens of prompt and response, and mask and log probabilities of the response."""


def _rows(rows: list[_Parts]) -> CheckedRow:
    sequences = [_sequence(*parts) for parts in rows if all("completion_hash" in turn for turn in parts[0]["turns"])]
    session = str(rows[0][0]["session"]) if rows else ""
    failures = [msgspec.structs.replace(one, session=session) for sequence in sequences for one in verify_sequence(sequence)]
    return CheckedRow(session, failures, None, *_counts(sequences))


def _sequence(labels: Mapping[str, Any], prompt: list[int], response: list[int], mask: list[int], logprobs: list[float]) -> Sequence:
    before = len(prompt)
    tokens = {"token_ids": [*prompt, *response], "loss_mask": [0] * before + mask, "logprobs": [0.0] * before + logprobs}
    return msgspec.convert({**labels, **tokens}, Sequence)


def _counts(sequences: list[Sequence]) -> tuple[int, int]:
    """Count turns and trainable tokens."""
    return sum(len(sequence.turns) for sequence in sequences), sum(sum(sequence.loss_mask) for sequence in sequences)

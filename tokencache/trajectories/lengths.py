"""Defines limits for the length of sequences; `limiting` applies them before a rollout is written in a format.

A limit never changes a token that stays: each kept row begins as recorded and ends after a whole turn. Each sampled token is still trained
at most once. What was left out or masked is reported in `figures.overlong` of the rollout, and as the label `overlong` of the sequence.
`complete` does not change: it describes the recording.

What happens to a sequence that is longer than a limit:

========  ============================================================================================================
`drop`    it is left out
`cut`     it ends after its last whole turn that fits. Without such a turn, or without a sampled token before it, it is left out
`mask`    it stays whole, so it stays too long. None of its tokens is trained: mask 0 and log probability 0.0
========  ============================================================================================================
"""

from collections.abc import Mapping
from typing import Annotated, TypedDict

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tokencache.core.lineage import TokenSequence
from tokencache.errors import HarnessError

POLICIES = ("drop", "cut", "mask")
LIMITS = ("max_length", "max_prompt_length", "max_response_length")
MOST = 2**31
"""The largest limit, in tokens."""

_Tokens = Annotated[int, Meta(ge=1)]
_Lag = Annotated[int, Meta(ge=0)]


class ExportParameters(msgspec.Struct, frozen=True):
    """How a trajectory is written: query parameters of the API, and options of `tokencache export`."""

    max_length: Annotated[_Tokens | UnsetType, Meta(description="Tokens that a sequence may have.")] = UNSET
    max_prompt_length: Annotated[
        _Tokens | UnsetType, Meta(description="Tokens that a sequence may have before its first sampled token.")
    ] = UNSET
    max_response_length: Annotated[
        _Tokens | UnsetType, Meta(description="Tokens that a sequence may have from its first sampled token on.")
    ] = UNSET
    overlong: Annotated[
        str | UnsetType,
        Meta(
            description="What happens to longer sequences: drop, cut (after a whole turn) or mask. Required with a limit.",
            extra_json_schema={"enum": POLICIES},
            extra={"metavar": "POLICY"},
        ),
    ] = UNSET
    max_lag: Annotated[
        _Lag | UnsetType,
        Meta(description="Leave out sequences that lag more policy versions than this, or an unknown number."),
    ] = UNSET
    model: Annotated[
        str | UnsetType,
        Meta(
            description="Write only the sequences of this model. Without it, formats for trainers have all models that are trained.",
            extra={"metavar": "MODEL"},
        ),
    ] = UNSET
    text: Annotated[
        bool, Meta(description="Native format: also write the messages, so that `tokencache convert` can write any format.")
    ] = False


class ExportOptions(TypedDict, total=False):
    """The `ExportParameters` as options of the client; `None` as if the option were not given."""

    max_length: int | None
    max_prompt_length: int | None
    max_response_length: int | None
    overlong: str | None
    max_lag: int | None
    model: str | None
    text: bool


class Lengths(msgspec.Struct, frozen=True):
    """Limits for the length of sequences, in tokens, and what happens to longer ones: `overlong` is one of `POLICIES`."""

    overlong: str
    max_length: int = MOST
    max_prompt_length: int = MOST
    max_response_length: int = MOST

    def allowed_end(self, sequence: TokenSequence) -> int:
        """Return the number of tokens after which a sequence must end: 0 if its prompt is too long."""
        start = sequence.response_start
        return min(self.max_length, start + self.max_response_length) if start <= self.max_prompt_length else 0


def lengths_of(given: Mapping[str, str]) -> Lengths | None:
    """Read limits from query parameters; `None` if there are none.

    Raises:
        HarnessError: a limit is not a positive number, `overlong` is not a policy, or only one of them is given.
    """
    limits = {name: _limit(name, given[name]) for name in LIMITS if given.get(name)}
    policy = given.get("overlong", "")
    if not limits and not policy:
        return None
    if not limits:
        raise HarnessError(f"overlong needs a limit: {', '.join(LIMITS)}", param="overlong")
    if policy not in POLICIES:
        raise HarnessError(f"with a maximum length, overlong must be one of: {', '.join(POLICIES)}", param="overlong")
    return Lengths(policy, **limits)


def parameters_of(options: ExportOptions) -> dict[str, str]:
    """Return the query parameters for options."""
    return {name: str(value).lower() for name, value in options.items() if value is not None}


def _limit(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 < int(value[:12]) <= MOST:
        raise HarnessError(f"{name} must be a number from 1 to {MOST}", param=name)
    return int(value)

"""Sampling policy: parameters that are used whatever the harness asks for.

A trainer wants its rollouts sampled at the temperature of its loss, and a harness brings a temperature of its own. A policy
pins parameters by name, for all sessions (the server's option) or for one (its registered key, which wins name by name).
They are written into the request before it is sent; what the harness had asked for is kept with the turn.

A pin is a value, not a limit: a harness that asks for less gets the pinned one, too. `max_tokens` stands for
`max_completion_tokens` as well, and the engine is told one of them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tokencache.dialects.body import value_of

Raw = msgspec.Raw

_NULL = b"null"
_LONG = "max_completion_tokens"
"""What OpenAI calls `max_tokens` on chat completions today; where a request has both, vLLM goes by this one (0.32)."""


class _Rule(NamedTuple):
    kinds: tuple[type, ...]
    holds: Callable[[Any], bool]
    words: str


_NUMBER, _WHOLE = (int, float), (int,)
_HOTTEST, _HARSHEST = 2, 2
_PENALTY = _Rule(_NUMBER, lambda v: -_HARSHEST <= v <= _HARSHEST, "a number from -2 to 2")

PINNED: Mapping[str, _Rule] = {
    "temperature": _Rule(_NUMBER, lambda v: 0 <= v <= _HOTTEST, "a number from 0 to 2"),
    "top_p": _Rule(_NUMBER, lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "top_k": _Rule(_WHOLE, lambda v: v >= -1, "a whole number: how many, or 0 or -1 for all"),
    "min_p": _Rule(_NUMBER, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "max_tokens": _Rule(_WHOLE, lambda v: v >= 1, "a whole number from 1"),
    "seed": _Rule(_WHOLE, lambda v: -(2**63) <= v < 2**63, "a whole number of 64 bits"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _Rule(_NUMBER, lambda v: 0 < v < float("inf"), "a number above 0"),
}
"""What can be pinned, and which values vLLM 0.32 takes (`sampling_params.py`, `SamplingParams._verify_args`)."""


def check_policy(policy: Mapping[str, Any]) -> None:
    """Check a policy's names and values.

    Raises:
        ValueError: one of them is none; the message says which, and what there is.
    """
    for name, value in policy.items():
        rule = PINNED.get(name)
        if rule is None:
            raise ValueError(f"{name[:80]!r} cannot be pinned; what can is: {', '.join(PINNED)}")
        if not isinstance(value, rule.kinds) or isinstance(value, bool) or not rule.holds(value):
            raise ValueError(f"{name!r} must be {rule.words}, not {str(value)[:80]}")


def pin(fields: dict[str, Raw], policy: Mapping[str, Any]) -> dict[str, Any]:
    """Write the values of a policy into a request's members, in place.

    Returns:
        What the harness had asked for where that is another value: name → its value, `None` if it had asked for nothing.
    """
    replaced = {}
    for name, value in policy.items():
        asked = _asked(fields, name)
        if isinstance(asked, bool) or asked != value:
            replaced[name] = asked
        fields[name] = Raw(msgspec.json.encode(value))
    if "max_tokens" in policy:
        fields.pop(_LONG, None)
    return replaced


def _asked(fields: Mapping[str, Raw], name: str) -> Any:
    for spelling in (_LONG, name) if name == "max_tokens" else (name,):
        raw = fields.get(spelling)
        if raw is not None and bytes(raw) != _NULL:
            return value_of(raw)
    return None

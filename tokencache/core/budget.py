"""Limits how much a session may use before its episode ends.

A limit is checked when a call begins, never during a call: a reply that is cut at the limit is no longer a sample of the policy. So calls
that are in progress may exceed the limit.
"""

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Budget(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one session: calls, sampled tokens, seconds since its first call. 0 means no limit, `None` means not set."""

    calls: _Count | None = None
    tokens: _Count | None = None
    seconds: _Seconds | None = None

    def __bool__(self) -> bool:
        """Whether any limit is set."""
        return bool(self.calls or self.tokens or self.seconds)

    def over(self, other: "Budget") -> "Budget":
        """Return this budget, with the other's limits where this one has `None`."""
        mine, others = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return Budget(**{name: limit if limit is not None else others[name] for name, limit in mine.items()})

    def spent(self, *, calls: int, tokens: int, seconds: float) -> str:
        """Describe the limit that is used up; `""` if another call is allowed.

        `calls` includes the new call. `tokens` are the sampled tokens of the recorded turns. `seconds` have passed since the first call.
        """
        if self.calls and calls > self.calls:
            return f"{self.calls} calls"
        if self.tokens and tokens >= self.tokens:
            return f"{self.tokens} tokens ({tokens} were sampled)"
        if self.seconds and seconds >= self.seconds:
            return f"{self.seconds:g} seconds ({seconds:.1f} have passed)"
        return ""

"""Budgets: how much a session may use before its episode is ended.

A limit is looked at when a call begins, and never within one: a call that was let in runs to its end, so a session may end
above its limit by what the calls hold that were under way. A reply that is cut at the limit would be no sample of the policy any more.
"""

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Budget(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one session: calls, tokens that were sampled, seconds since it began; 0 is no limit, `None` says nothing of it."""

    calls: _Count | None = None
    tokens: _Count | None = None
    seconds: _Seconds | None = None

    def __bool__(self) -> bool:
        """Whether there is a limit."""
        return bool(self.calls or self.tokens or self.seconds)

    def over(self, other: "Budget") -> "Budget":
        """This budget, with the other's limits where it says nothing."""
        mine, others = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return Budget(**{name: limit if limit is not None else others[name] for name, limit in mine.items()})

    def spent(self, *, calls: int, tokens: int, seconds: float) -> str:
        """Name what is used up, in words; `""` if another call may be made.

        `calls` counts the call that asks; `tokens` are those of the turns that are recorded by now.
        """
        if self.calls and calls > self.calls:
            return f"{self.calls} calls"
        if self.tokens and tokens >= self.tokens:
            return f"{self.tokens} tokens ({tokens} were sampled)"
        if self.seconds and seconds >= self.seconds:
            return f"{self.seconds:g} seconds ({seconds:.1f} went by)"
        return ""

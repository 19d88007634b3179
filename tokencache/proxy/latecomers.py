"""Latecomers: calls that reach a session after it was sealed.

They are refused, and nothing is sampled; but a trainer that sealed too early should see that its harness had more to say. A harness may
try again for ever, so only the first of them are noted one by one, and after those the 32nd, the 64th and so on, each with the
number of all that came: a session's incidents do not grow with the patience of a harness.
"""

from collections import OrderedDict

ONE_BY_ONE = 16
_SESSIONS = 4096
"""So many sessions' latecomers are counted at a time; the count of one that is forgotten begins anew."""


class Latecomers:
    """Counts the late calls of each session, as far as they come through this process."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def count(self, session: str) -> int:
        """Count one more; its number if it is to be noted, else 0."""
        number = self._counts.pop(session, 0) + 1
        self._counts[session] = number
        if len(self._counts) > _SESSIONS:
            self._counts.popitem(last=False)
        return number if number <= ONE_BY_ONE or number.bit_count() == 1 else 0

    def forget(self, session: str) -> None:
        """Forget a session that was deleted."""
        self._counts.pop(session, None)

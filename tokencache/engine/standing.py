"""Standing: what is known of a model on an engine, and when the engine is probed for it again.

=============  ========================================================================  ===============================================
state          what was found                                                            probed again
=============  ========================================================================  ===============================================
`unprobed`     nothing yet, or it was forgotten: the engine went away                    at once
`failed`       nothing: the probe ended with an error                                    after a pause
`lowered`      a level below the best that was ever found here, or below `--require`     after a pause; calls are served meanwhile
`ready`        as much as is wanted                                                      when it is forgotten
=============  ========================================================================  ===============================================

A pause is twice the one before, up to a minute. A level that fell is not taken for good: the engine may still be starting, or a
router before it may have lost a route.
"""

import time
from typing import TYPE_CHECKING, Literal

from tokencache.errors import EngineError

if TYPE_CHECKING:
    from tokencache.engine.model import Model

State = Literal["unprobed", "failed", "lowered", "ready"]
Level = Literal["exact", "record", "relay"]
LEVELS: tuple[Level, ...] = ("relay", "record", "exact")
"""From the least to the most that an engine can do (`probe`)."""

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds before an engine is probed again."""


def higher(one: Level, other: Level) -> Level:
    """The higher of two levels."""
    return max(one, other, key=LEVELS.index)


class ModelState:
    """The state of one model on one engine.

    Attributes:
        model: what the last probe found that came to an end; `None` in the states `unprobed` and `failed`.
        failure: why the last probe found nothing, or did not come to an end.
        wanted: the level below which the state is `lowered`.
    """

    def __init__(self) -> None:
        self.model: Model | None = None
        self.failure: EngineError | None = None
        self.wanted: Level = "relay"
        self._pause = FIRST_PAUSE
        self._due = 0.0

    @property
    def state(self) -> State:
        """See above."""
        if self.model is not None:
            return "ready" if LEVELS.index(self.model.capability.level) >= LEVELS.index(self.wanted) else "lowered"
        return "unprobed" if self.failure is None else "failed"

    @property
    def due(self) -> bool:
        """Whether the engine is to be probed again now."""
        state = self.state
        return state == "unprobed" or (state != "ready" and time.monotonic() >= self._due)

    def found(self, model: "Model", wanted: Level) -> None:
        """Take what a probe found."""
        self.model, self.failure, self.wanted = model, None, wanted
        self._later()

    def failed(self, why: EngineError) -> None:
        """Take that a probe did not come to an end; a model that is known stays."""
        self.failure = why
        self._later()

    def _later(self) -> None:
        self._due = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

"""The log: what its lines say, and what they keep to themselves.

A log is read by more people than rollouts are, and kept for longer. So it names sessions, calls, kinds of events, counts and
lengths, and never, unless debugging is asked for, what was said by a harness or a model, or a key: not what an engine complains of
(vLLM quotes the request that it refuses) and not the words of an exception (a `KeyError` quotes its key). Where such words matter they
stand in the session's incidents, which are the trainer's.

The rule for `log.…` calls is: words of others go to debug. What no such call can see to is seen to here: of a traceback the places and
the types are printed, and a line is a line, whatever stands in the values that it shows.
"""

import logging
import re
import traceback

_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LINE_OF_ONE = "%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DEEPEST = 8
"""Exceptions of a chain that are shown, the last one first."""


class LineFormatter(logging.Formatter):
    """Formats records; `words` is whether exceptions may say what they say, `several` whether lines name their process."""

    def __init__(self, *, words: bool, several: bool = False) -> None:
        super().__init__(_LINE_OF_ONE if several else _LINE)
        self._words = words

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """Write the line of a record, without what follows it."""
        if record.name == "asyncio" and not self._words:  # its further lines show futures with their exceptions
            record.message = record.message.partition("\n")[0]
        return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's own name
        """Write where an exception was raised, and of what type it is; its words only if they are wanted."""
        if self._words:
            return super().formatException(ei)  # type: ignore[arg-type]
        assert isinstance(ei, tuple)  # noqa: S101 - logging hands over what `sys.exc_info` gives
        return "\n".join(_places(ei[1]))


def _places(why: BaseException | None) -> list[str]:
    lines: list[str] = []
    for _ in range(_DEEPEST):
        if why is None:
            break
        lines += [f"{type(why).__module__}.{type(why).__qualname__}, raised in", *_frames(why)]
        why = why.__cause__ or (None if why.__suppress_context__ else why.__context__)
        lines += ["which came from"] if why is not None else []
    return lines


def _frames(why: BaseException) -> list[str]:
    return [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(why.__traceback__)]


def set_up(level: str, *, several: bool = False) -> None:
    """Log to standard error, from a level on: `debug` (with all words), `info`, `warning` or `error`.

    `several` processes write there: each line has the number of its own.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(words=level == "debug", several=several))
    logging.basicConfig(level=level.upper(), handlers=[handler])

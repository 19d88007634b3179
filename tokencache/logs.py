"""Formats the log and keeps the texts of harnesses and models out of it.

More people read a log than rollouts, and it is kept longer. So it contains only names of sessions and calls, kinds of events, counts and
lengths. Above debug level it contains no key and no text of a harness, a model, an engine's error (vLLM quotes the request that it
refuses) or an exception (a `KeyError` quotes its key). If such a text matters, it is in the session's incidents, which only the trainer
can read.

Every call of `log.…` must follow this rule: no text from outside above debug level. This module handles the rest: tracebacks show only
source lines and exception types, and control characters are escaped, so that a value cannot forge a line.
"""

import logging
import re
import traceback
from datetime import UTC, datetime
from typing import Literal

import msgspec

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_CHAIN = 8
"""Exceptions of a chain that are shown, the last one first."""


class LineFormatter(logging.Formatter):
    """Formats records.

    Args:
        messages: whether messages of exceptions are shown.
        several: whether lines contain the process id.
    """

    def __init__(self, *, messages: bool, several: bool = False) -> None:
        super().__init__()
        self._messages, self._several = messages, several

    def shown(self, record: logging.LogRecord) -> str:
        """Return what of a record's message may be shown."""
        message = record.getMessage()
        if record.name == "asyncio" and not self._messages:  # its further lines show futures with their exceptions
            return message.partition("\n")[0]
        return message

    def format(self, record: logging.LogRecord) -> str:
        """Format a record: one line, and its traceback."""
        time = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds").replace(".", ",")  # noqa: DTZ006 - local time
        process = f" [{record.process}]" if self._several else ""
        line = f"{time} {record.levelname}{process} {record.name}: {self.shown(record)}"
        line = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], line)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's own name
        """Format the type of an exception and where it was raised. Its message is included only if `messages` is set."""
        if self._messages:
            return super().formatException(ei)  # type: ignore[arg-type]
        assert isinstance(ei, tuple)  # noqa: S101 - logging passes what `sys.exc_info` returns
        return "\n".join(_places(ei[1]))


class JsonFormatter(LineFormatter):
    """Formats records as JSON, one object a line. The members of `record.fields` (`extra={"fields": …}`) are members of the object."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": self.shown(record),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _places(why: BaseException | None) -> list[str]:
    lines: list[str] = []
    for _ in range(_MAX_CHAIN):
        if why is None:
            break
        lines += [f"{type(why).__module__}.{type(why).__qualname__}, raised in"]
        lines += [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(why.__traceback__)]
        why = why.__cause__ or (None if why.__suppress_context__ else why.__context__)
        lines += ["caused by"] if why is not None else []
    return lines


LogFormat = Literal["text", "json"]


def set_up(level: str, form: LogFormat = "text", *, several: bool = False) -> None:
    """Log to standard error.

    Args:
        level: least severe level to log: `debug` (which also shows messages of exceptions), `info`, `warning` or `error`.
        form: `text`, or `json`: one object a line.
        several: whether several processes write there. Each line then contains the process id, which one in JSON always does.
    """
    handler = logging.StreamHandler()
    formatter = JsonFormatter if form == "json" else LineFormatter
    handler.setFormatter(formatter(messages=level == "debug", several=several))
    logging.basicConfig(level=level.upper(), handlers=[handler])

"""JSON of strangers: read strictly first; what strict readers refuse and harnesses and models write all the same, leniently.

    half a character    a surrogate without its other half: read, and written, as U+FFFD. UTF-8 cannot say it and no
                        engine's tokenizer takes it; some harnesses (Claude Code) send U+FFFD for it themselves
    very long integers  read; written with all their digits
    NaN, Infinity       refused, and so is a number that no double can hold: whatever stood there, it was no JSON
    nested too deeply   refused: no member of an API is nested so

A digest takes half a character for U+FFFD as well (`core.messages`), so a reply is recognised however it came back. Chat
itself is not read here but passed on as it was written: what becomes of it is the engine's to say.
"""

import json
import math
import re
from typing import Any, NoReturn

import msgspec

from tokencache.errors import HarnessError

_SURROGATE = re.compile("[\ud800-\udfff]")
_TOO_DEEP = "the request is nested too deeply"
_SHOWN = 80


def read(text: str | bytes) -> Any:
    """Read JSON.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.
    """
    try:
        return msgspec.json.decode(text)
    except ValueError:
        found = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        said = json.dumps(found, ensure_ascii=False)
        return json.loads(whole(said)) if _SURROGATE.search(said) else found


def read_body(body: bytes) -> Any:
    """Read a request's body.

    Raises:
        HarnessError: it is no JSON, or nested too deeply.
    """
    try:
        return read(body)
    except ValueError as why:
        raise HarnessError(f"the request body is not valid JSON: {why}") from None
    except RecursionError:
        raise HarnessError(_TOO_DEEP) from None


def write(value: Any) -> bytes:
    """Write compact JSON.

    Raises:
        HarnessError: it is nested too deeply.
    """
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        raise HarnessError(_TOO_DEEP) from None
    except (ValueError, OverflowError):
        return whole(json.dumps(value, ensure_ascii=False, separators=(",", ":"))).encode()


def whole(text: str) -> str:
    """Replace halves of characters, which no UTF-8 can say."""
    return _SURROGATE.sub("\ufffd", text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"the number {text[:_SHOWN]} is out of range")
    return number

"""Cuts long values out of a reply's JSON, so that they are parsed separately, or not at all.

Three members hold nearly all bytes of a reply: the prompt's ids, the log probabilities, and routed experts. Each is found by its name as
vLLM writes it. No JSON string can contain that text, because its quotes would be escaped. A mark, which is a short JSON string, replaces
the value. Parsing the rest shows whether the value belonged to the expected member: then that member's value is the mark.
"""

from collections.abc import Sequence

FIRST_MARK = b'"=0"'
_BEGIN = b'"='


def cut(data: bytes, spans: Sequence[tuple[int, int]], first: int = 0) -> bytes:
    """Replace spans of JSON, each a complete value, by the marks `"=0"`, `"=1"`, …, numbered from `first`."""
    kept, end = [], 0
    for number, (start, after) in enumerate(spans, first):
        kept += [data[end:start], b'"=%d"' % number]
        end = after
    return b"".join((*kept, data[end:]))


def mark_number(raw: bytes) -> int:
    """Return the number of a mark; -1 for any other raw JSON value."""
    digits = raw[len(_BEGIN) : -1]
    return int(digits) if raw.startswith(_BEGIN) and digits.isdigit() else -1

"""Aligns two tokenizations of one reply, column by column.

Both rows are split into characters and compared (`difflib`), so that equal text is in the same columns, however it is split into tokens. A
bar in a row marks the start of a token. If only one row has a text, the other row has blanks in these columns. A character whose bytes
belong to several tokens is written in hexadecimal, byte by byte.
"""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from rich.cells import cell_len

BAR = "│"
_SHOWN = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_KEPT, _LONG = 16, 40
"""If at least `_LONG` consecutive columns have text in only one row, up to `_KEPT` of them are kept at either end."""


class Column(NamedTuple):
    """One column: its text in either row, padded to one width, and whether it belongs to a token that both rows have."""

    top: str
    bottom: str
    width: int
    top_same: bool
    bottom_same: bool


class _Atom(NamedTuple):
    """One character of a row: the character, its shown form, whether it starts a token, its (first) token, and the range of its bytes."""

    char: str
    shown: str
    begins: bool
    token: int
    start: int
    end: int


def align(top: Sequence[bytes], bottom: Sequence[bytes]) -> list[Column]:
    """Align two rows of tokens, each given as its bytes."""
    above, below = list(_atoms(top)), list(_atoms(bottom))
    codes = SequenceMatcher(None, [a.char for a in above], [b.char for b in below], autojunk=False).get_opcodes()
    place: dict[int, int] = {}
    for kind, i, i_end, j, j_end in codes:
        if kind == "equal":
            place.update(zip(range(above[i].start, above[i_end - 1].end), range(below[j].start, below[j_end - 1].end), strict=True))
    same_above, same_below = _shared(top, bottom, place)
    columns: list[Column] = []
    for kind, i, i_end, j, j_end in codes:
        pairs: list[tuple[_Atom | None, _Atom | None]]
        if kind == "equal":
            pairs = list(zip(above[i:i_end], below[j:j_end], strict=True))
        else:
            pairs = [(atom, None) for atom in above[i:i_end]] + [(None, atom) for atom in below[j:j_end]]
        for a, b in pairs:
            same = (a is not None and a.token in same_above, b is not None and b.token in same_below)
            if (a and a.begins) or (b and b.begins):
                columns.append(Column(BAR if a and a.begins else " ", BAR if b and b.begins else " ", 1, *same))
            width = max(cell_len(a.shown) if a else 0, cell_len(b.shown) if b else 0)
            columns.append(Column(_pad(a, width), _pad(b, width), width, *same))
    return [*_shorten(columns), Column(BAR, BAR, 1, top_same=True, bottom_same=True)]


def wrap(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Split columns into lines of at most `width` cells. Lines end before a bar if possible."""
    lines: list[list[Column]] = [[]]
    for column in columns:
        line = lines[-1]
        if line and sum(each.width for each in line) + column.width > width:
            cut = max((n for n, each in enumerate(line) if BAR in each[:2]), default=0) or len(line)
            lines[-1:] = [line[:cut], line[cut:]]
        lines[-1].append(column)
    return lines


def _atoms(tokens: Sequence[bytes]) -> Iterator[_Atom]:
    owner = [n for n, token in enumerate(tokens) for _ in token]
    first = {at for at in range(len(owner)) if at == 0 or owner[at] != owner[at - 1]}
    at = 0
    for char in b"".join(tokens).decode("utf-8", "surrogateescape"):
        raw = char.encode("utf-8", "surrogateescape")
        cuts = [0, *(n for n in range(1, len(raw)) if at + n in first), len(raw)]
        whole = len(cuts) == 2  # noqa: PLR2004 - a beginning and an end
        shown = _visible(char) if whole else BAR.join(_hex(raw[a:b]) for a, b in pairwise(cuts))
        yield _Atom(char, shown, at in first, owner[at], at, at + len(raw))
        at += len(raw)


def _visible(char: str) -> str:
    if char in _SHOWN:
        return _SHOWN[char]
    if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}:
        return _hex(char.encode("utf-8", "surrogateescape"))
    return char if cell_len(char) else f"◌{char}"


def _hex(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


def _pad(atom: _Atom | None, width: int) -> str:
    text = atom.shown if atom is not None else ""
    return text + " " * (width - cell_len(text))


def _shared(top: Sequence[bytes], bottom: Sequence[bytes], place: Mapping[int, int]) -> tuple[set[int], set[int]]:
    """Find the tokens that both rows have with the same bytes. `place` maps bytes of the top row to bytes of the bottom row."""
    token_at = {span: token for token, span in enumerate(_spans(bottom))}
    pairs = set()
    for token, (start, end) in enumerate(_spans(top)):
        facing = [place.get(at, -1) for at in range(start, end)]
        span = (facing[0], facing[0] + len(facing)) if facing else (-1, -1)
        if span in token_at and facing == list(range(*span)):
            pairs.add((token, token_at[span]))
    return {token for token, _ in pairs}, {token for _, token in pairs}


def _spans(tokens: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return the half-open range of bytes of each token."""
    ends = list(accumulate(map(len, tokens)))
    return list(zip([0, *ends], ends, strict=False))


def _shorten(columns: list[Column]) -> list[Column]:
    """Remove the middle of long runs of columns that only one row has."""
    found: list[Column] = []
    for lone, group in groupby(columns, key=lambda c: not c.bottom.strip() or not c.top.strip()):
        stretch = list(group)
        borders = [n for n, column in enumerate(stretch) if BAR in column[:2]]
        head = max((n for n in borders if n < _KEPT), default=0)
        tail = min((n for n in borders if n >= len(stretch) - _KEPT), default=len(stretch))
        if lone and len(stretch) >= _LONG:
            left_out = "│ … "
            row = (left_out, " " * len(left_out)) if stretch[head].top.strip() else (" " * len(left_out), left_out)
            stretch = [*stretch[:head], Column(*row, len(left_out), top_same=False, bottom_same=False), *stretch[tail:]]
        found += stretch
    return found

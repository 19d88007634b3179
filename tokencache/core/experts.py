"""Routed experts: one row for each token, the experts to which the layers of a mixture of experts sent it.

An engine reports a row for each token that it computed: all of prompt and completion except the last token, which was sampled and not
computed. A turn's prompt begins with the prefix of another turn (`Turn.base`), whose rows are stored already. So a turn's own file begins
at the first token without a stored row (`Turn.experts_start`), and what a session stores grows with its tokens, not with their square.

`file_parts` says which files together cover a sequence, and `joined` puts rows together.
"""

import ast
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tokencache.core.turn import Turn

UNPLACED = -1
"""`Turn.experts_start` of a file whose rows are not known to belong to certain tokens."""
SUFFIX = ".npy"
_MAGIC = b"\x93NUMPY"
_KIND = re.compile(r"[|<>=][uib](\d+)")
_ALIGNED = 64


class ExpertRows(msgspec.Struct, frozen=True):
    """Rows of routed experts.

    Attributes:
        kind: type of a number in NumPy's notation, such as `|u1`.
        shape: shape of a row: layers, experts for each token.
        data: the rows, one after the other.
    """

    kind: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def width(self) -> int:
        """The size of a row in bytes."""
        return math.prod(self.shape) * _item_size(self.kind)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.data) // self.width

    def between(self, start: int, end: int) -> "ExpertRows":
        """Return the rows of a half-open range."""
        return msgspec.structs.replace(self, data=self.data[start * self.width : end * self.width])

    def as_npy(self) -> bytes:
        """Write a file in the format `.npy` 1.0, which `numpy.load` reads."""
        shape = (len(self), *self.shape)
        head = f"{{'descr': '{self.kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
        head += b" " * (-(len(_MAGIC) + 4 + len(head) + 1) % _ALIGNED) + b"\n"
        return _MAGIC + b"\x01\x00" + len(head).to_bytes(2, "little") + head + self.data


class ExpertPart(msgspec.Struct, frozen=True):
    """The file with the rows of the tokens from `start` to `end` (half-open) of a sequence. They are its first rows; it may have more."""

    path: str
    start: int
    end: int


def read_npy(file: bytes | bytearray) -> ExpertRows:
    """Read a `.npy` file with a row for each token.

    Format: numpy.org/doc/stable/reference/generated/numpy.lib.format.html, versions 1 to 3.

    Raises:
        ValueError: it is no such file, or is damaged.
    """
    if not file.startswith(_MAGIC):
        raise ValueError("not a .npy file")
    size = 2 if file[len(_MAGIC)] == 1 else 4
    start = len(_MAGIC) + 2 + size
    end = start + int.from_bytes(file[start - size : start], "little")
    described = _header(bytes(file[start:end]))
    kind, shape = described.get("descr"), described.get("shape")
    data = bytes(memoryview(file)[end:])
    if not isinstance(kind, str) or _KIND.fullmatch(kind) is None or described.get("fortran_order") is not False:
        raise ValueError("its numbers are not integers, row by row")
    if not isinstance(shape, tuple) or len(shape) < 2 or not all(isinstance(one, int) and one >= 0 for one in shape):  # noqa: PLR2004
        raise ValueError(f"its shape is {shape}, not a row for each token")
    if math.prod(shape) * _item_size(kind) != len(data) or not math.prod(shape[1:]):
        raise ValueError(f"{len(data)} bytes for the shape {shape}: it is damaged")
    return ExpertRows(kind, shape[1:], data)


def _header(text: bytes) -> Mapping[Any, Any]:
    try:
        found = ast.literal_eval(text.decode("latin-1").strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as why:
        raise ValueError("its header cannot be read") from why
    if not isinstance(found, dict):
        raise ValueError("its header cannot be read")  # noqa: TRY004 - the file is wrong, not an argument
    return found


def _item_size(kind: str) -> int:
    return int(kind[2:])


def placed(rows: int, tokens: int, asked: int) -> int:
    """Find the token to which the first of an engine's rows belongs.

    Args:
        rows: number of rows.
        tokens: number of tokens of prompt and completion. All but the last have a row.
        asked: the first token whose row was requested. An engine that does not know the request returns all rows.

    Returns:
        0 or `asked`; `UNPLACED` if the number of rows fits neither.
    """
    if rows == tokens - 1:
        return 0
    return asked if rows == tokens - 1 - asked else UNPLACED


def covered(turn: Turn) -> int:
    """Return how many tokens at the beginning of a turn's prefix have stored rows, in its own file and those of its bases."""
    if turn.experts_start == UNPLACED or (turn.experts and not turn.experts.endswith(SUFFIX)):
        return 0
    return row_count(turn) if turn.experts else turn.experts_start


def row_count(turn: Turn) -> int:
    """Return the number of rows of a turn's prompt and completion."""
    return turn.prompt_tokens + turn.completion_tokens - 1


def file_parts(turn: Turn, turns: Mapping[str, Turn]) -> list[ExpertPart]:
    """List the files with the rows of a turn's prompt and completion, in the order of the tokens.

    Tokens that no part covers have no rows: the last token, and what an engine did not report (a stream of vLLM 0.32, a lost file).

    Args:
        turn: the turn.
        turns: all turns of its session, by id.
    """
    found: list[ExpertPart] = []
    end = row_count(turn)
    at: Turn | None = turn
    while at is not None and end > 0:
        end = min(end, row_count(at))
        if covered(at):
            if at.experts and at.experts_start < end:
                found.append(ExpertPart(at.experts, at.experts_start, end))
            end = min(end, at.experts_start)
        else:
            end = min(end, at.shared)
        at = turns.get(at.base or "")
    return found[::-1]


def joined(pieces: Iterable[tuple[int, ExpertRows]]) -> ExpertRows:
    """Join rows of consecutive tokens. Where pieces overlap, the earlier piece counts: it has the rows with which tokens were sampled.

    Args:
        pieces: the token of each piece's first row, and its rows, in the order of the tokens.

    Raises:
        ValueError: there are none, tokens between two pieces have no rows, or the pieces are of different models.
    """
    whole: ExpertRows | None = None
    first = 0
    for start, rows in pieces:
        if whole is None:
            whole, first = rows, start
            continue
        end = first + len(whole)
        if not first <= start <= end:
            raise ValueError(f"the tokens from {end} to {start} have no routed experts")
        if (rows.kind, rows.shape) != (whole.kind, whole.shape):
            raise ValueError(f"rows of {rows.shape} {rows.kind} follow rows of {whole.shape} {whole.kind}")
        whole = msgspec.structs.replace(whole, data=whole.data + rows.between(end - start, len(rows)).data)
    if whole is None:
        raise ValueError("there are no routed experts")
    return whole

"""Rollouts as Parquet: a row for each training sample, in row groups of bounded size.

`native` has a schema of its own (`SCHEMA`), ids as int32 and log probabilities as float32. Nothing is lost: what has no
column of its own is JSON text in `turns`, `more` (of the sequence) and `rollout` (of the session, repeated in each of its
rows). A session without sequences has no row; it stands in the file's metadata under `tokencache.rollouts`.

Of other formats the columns are the members of their rows. Which types they have is known only when all rows were seen, so
rows wait in a temporary file until then. Lists of integers become int32 and lists of floats float32, where this changes no
value; where an object stands in a column, all its values become JSON text. A format whose rows are objects all through is refused.
"""

import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

from tokencache.commands.files import FileError, Sink, Unfinished, rows_of
from tokencache.trajectories.formats.registry import Format

GROUP_TOKENS, GROUP_ROWS = 1 << 20, 8192
"""A row group ends behind the rollout with which it has so many tokens, or rows."""

_BARE = b"tokencache.rollouts"
_JSON = msgspec.json.Encoder()
_KINDS = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "object": pa.string(),
    "[]": pa.list_(pa.int32()),
    "[bool]": pa.list_(pa.bool_()),
    "[str]": pa.list_(pa.string()),
    "[int32]": pa.list_(pa.int32()),
    "[int64]": pa.list_(pa.int64()),
    "[float32]": pa.list_(pa.float32()),
    "[float64]": pa.list_(pa.float64()),
}
_ABOVE = {
    "null": set(_KINDS),
    "[]": {"[bool]", "[str]", "[int32]", "[int64]", "[float32]", "[float64]"},
    "int": {"float"},
    "[int32]": {"[int64]", "[float64]"},
    "[float32]": {"[float64]"},
}
"""Which kinds can hold all values of a kind, beside itself."""

_IDS = frozenset({"[int32]", "[int64]"})

_PLAIN = (  # members of a sequence with a column of their own
    ("id", pa.string()),
    ("parent", pa.string()),
    ("root", pa.string()),
    ("start", pa.string()),
    ("reason", pa.string()),
    ("continued", pa.bool_()),
    ("tools", pa.int32()),
    ("weight", pa.float64()),
    ("tokens", pa.int32()),
    ("trainable_tokens", pa.int32()),
    ("token_ids", _KINDS["[int32]"]),
    ("loss_mask", pa.list_(pa.uint8())),
    ("logprobs", _KINDS["[float32]"]),
)
_TOLD = ("model", "harness")  # of the turns: the names that occur, in order, joined by commas

SCHEMA = pa.schema(
    [
        ("session", pa.string()),
        ("complete", pa.bool_()),
        *(("sequence" if name == "id" else name, kind) for name, kind in _PLAIN),
        *((name, pa.string()) for name in _TOLD),
        ("turns", pa.string()),
        ("more", pa.string()),
        ("rollout", pa.string()),
    ]
)


def create(file: Unfinished, wanted: Format) -> Sink:
    """Make a sink for a format."""
    return _Native(file) if wanted.name == "native" else _Rows(file, wanted)


class _Groups:
    """A Parquet file under way: rows are gathered into groups."""

    def __init__(self, file: Unfinished, schema: pa.Schema) -> None:
        self.file = file
        self._schema = schema
        self._writer = pq.ParquetWriter(file.part, schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def add(self, row: dict[str, Any], tokens: int) -> None:
        self._rows.append(row)
        self._tokens += tokens
        if self._tokens >= GROUP_TOKENS or len(self._rows) >= GROUP_ROWS:
            self._flush()

    def close(self, metadata: Mapping[bytes, bytes] | None = None) -> None:
        self._flush()
        if metadata:
            self._writer.add_key_value_metadata(metadata)
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows, self._tokens = [], 0


class _Native:
    """Writes native rollouts, a row a sequence."""

    def __init__(self, file: Unfinished) -> None:
        self._groups = _Groups(file, SCHEMA)
        self._bare: list[Any] = []
        self.rows = 0

    def write(self, rollout: bytes) -> None:
        told = msgspec.json.decode(rollout)
        sequences = told.pop("sequences")
        if not sequences:
            self._bare.append(told)
        about = {"session": told["session"], "complete": told["complete"], "rollout": _text(told)}
        rows = [{**about, **_row(sequence, told["session"])} for sequence in sequences]  # all of a rollout, or none
        for row in rows:
            self._groups.add(row, row["tokens"])
        self.rows += len(rows)

    def finish(self) -> None:
        self._close()
        self._groups.file.publish()

    def leave(self) -> Path | None:
        self._close()
        return self._groups.file.part

    def _close(self) -> None:
        self._groups.close({_BARE: _JSON.encode(self._bare)})


def _row(sequence: dict[str, Any], session: str) -> dict[str, Any]:
    turns = sequence.pop("turns")
    row = {name: sequence.pop(name) for name, _ in _PLAIN}
    row["sequence"] = row.pop("id")
    if not _is_single(row["logprobs"]):
        raise FileError(
            f"session {session}: its log probabilities are finer than float32, which is what Parquet files hold; a .jsonl file holds them"
        )
    for name in _TOLD:
        row[name] = ",".join(dict.fromkeys(turn[name] for turn in turns if turn[name]))
    return {**row, "turns": _text(turns), "more": _text(sequence)}


def _is_single(values: Sequence[float | None]) -> bool:
    """Whether float32 holds every value exactly."""
    numbers = [value for value in values if value is not None]
    return array("f", numbers).tolist() == numbers


def read(path: Path) -> Iterator[Any]:
    """Read native rollouts back, as the JSON values that were written.

    Raises:
        FileError: this is no Parquet file, or none of native rollouts.
    """
    try:
        with pq.ParquetFile(path) as file:
            if file.schema_arrow.names != SCHEMA.names:
                raise FileError(f"{path} does not hold native rollouts: its columns are {', '.join(file.schema_arrow.names)}")
            rows = (row for batch in file.iter_batches(batch_size=64) for row in batch.to_pylist())
            for _, own in groupby(rows, key=lambda row: row["rollout"]):
                yield _together(list(own))
            bare = (file.metadata.metadata or {}).get(_BARE, b"[]")
            yield from ({**told, "sequences": []} for told in msgspec.json.decode(bare))
    except pa.ArrowInvalid as why:
        raise FileError(f"{path} cannot be read as Parquet: {why}") from None


def _together(rows: list[dict[str, Any]]) -> Any:
    sequences = []
    for row in rows:
        plain = {name: row["sequence" if name == "id" else name] for name, _ in _PLAIN}
        sequences.append({**plain, **msgspec.json.decode(row["more"]), "turns": msgspec.json.decode(row["turns"])})
    return {**msgspec.json.decode(rows[0]["rollout"]), "sequences": sequences}


class _Rows:
    """Writes the rows of any other format: first aside, then, once the types of all members are known, as Parquet."""

    def __init__(self, file: Unfinished, wanted: Format) -> None:
        self._file = file
        self._format = wanted
        self._aside = tempfile.TemporaryFile(dir=file.path.parent)  # noqa: SIM115 - closed with the sink
        self._kinds: dict[str, str] = {}
        self.rows = 0

    def write(self, rollout: bytes) -> None:
        for raw in rows_of(rollout, self._format):
            row = msgspec.json.decode(raw)
            if not self.rows and not any(_kind(value) in _IDS for value in row.values()):
                words = (
                    f"the rows of format {self._format.name} hold no token ids but within objects, which a Parquet file would hold as text"
                )
                raise FileError(f"{words}: name a .jsonl file")
            for name, value in row.items():
                self._kinds[name] = self._both(name, self._kinds.get(name, "null"), _kind(value))
            self._aside.write(bytes(raw) + b"\n")
            self.rows += 1

    def _both(self, name: str, one: str, other: str) -> str:
        """The kind that holds the values of both."""
        if one == other or one in _ABOVE.get(other, ()):
            return one
        if other in _ABOVE.get(one, ()):
            return other
        if "object" in {one, other}:
            return "object"
        if {one, other} <= {"[int32]", "[int64]", "[float32]", "[float64]"}:
            return "[float64]"
        words = f"{name!r} is {one} in some rows of format {self._format.name} and {other} in others"
        raise FileError(f"{words}: a Parquet column cannot be both, a .jsonl file can")

    def finish(self) -> None:
        self._press()
        self._file.publish()

    def leave(self) -> Path | None:
        self._press()
        return self._file.part

    def _press(self) -> None:
        groups = _Groups(self._file, pa.schema([(name, _KINDS[kind]) for name, kind in self._kinds.items()]))
        texts = [name for name, kind in self._kinds.items() if kind == "object"]
        with self._aside:
            self._aside.seek(0)
            for line in self._aside:
                row = msgspec.json.decode(line)
                for name in texts:
                    row[name] = _text(row[name]) if row.get(name) is not None else None
                groups.add(row, sum(len(value) for value in row.values() if isinstance(value, list)))
        groups.close()


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if not isinstance(value, list):
        return {bool: "bool", int: "int", float: "float", str: "str"}.get(type(value), "object")
    types = {type(one) for one in value if one is not None}
    if not types:
        return "[]"
    if types == {int}:
        small = all(-(2**31) <= one < 2**31 for one in value if one is not None)
        return "[int32]" if small else "[int64]"
    if types <= {int, float}:
        return "[float32]" if _is_single(value) else "[float64]"
    return {frozenset({bool}): "[bool]", frozenset({str}): "[str]"}.get(frozenset(types), "object")


def _text(value: Any) -> str:
    return _JSON.encode(value).decode()

"""Writes and reads rollouts as Parquet: one row for each training sample, in row groups of bounded size.

`native` has a fixed schema (`SCHEMA`), with ids as int32 and log probabilities as float32. Nothing is lost: members without a column
are JSON text in `turns`, `more` (of the sequence) and `rollout` (of the session, repeated in each of its rows). A session without
sequences has no row; it is in the metadata of the file under `tokencache.rollouts`.

For other formats the columns are the members of their rows. Their types are known only at the end, so rows are first written to a
temporary file. Lists of integers become int32 and lists of floats float32 if no value changes. If a column contains an object, all its
values become JSON text. A format in which every member is an object is refused.

The metadata of each file has a digest of all rows under `tokencache.digest`.
"""

import hashlib
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

from tokencache.commands.sink import FileError, PartFile, Sink, rows_of
from tokencache.trajectories.digest import canonical
from tokencache.trajectories.formats.registry import Format

GROUP_TOKENS, GROUP_ROWS = 1 << 20, 8192
"""A row group ends when it has at least this many tokens or rows."""

_WITHOUT_ROWS, _DIGEST = b"tokencache.rollouts", b"tokencache.digest"
_NUMBERS = {"int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32(), "float64": pa.float64()}
_TYPES = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "object": pa.string(),
    "[]": pa.list_(pa.int32()),
    "[bool]": pa.list_(pa.bool_()),
    "[str]": pa.list_(pa.string()),
    "[[]]": pa.list_(pa.list_(pa.int32())),
    **{f"[{name}]": pa.list_(kind) for name, kind in _NUMBERS.items()},
    **{f"[[{name}]]": pa.list_(pa.list_(kind)) for name, kind in _NUMBERS.items()},
}
_WIDER = {
    "null": set(_TYPES),
    "[]": {"[bool]", "[str]", "[int32]", "[int64]", "[float32]", "[float64]"},
    "int": {"float"},
    "[int32]": {"[int64]", "[float64]"},
    "[float32]": {"[float64]"},
    "[[]]": {"[[int32]]", "[[int64]]", "[[float32]]", "[[float64]]"},
    "[[int32]]": {"[[int64]]"},
    "[[float32]]": {"[[float64]]"},
}
"""The other kinds that can hold all values of a kind."""

_IDS = frozenset({"[int32]", "[int64]"})

_COLUMNS = (  # members of a sequence that have a column
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
    ("token_ids", _TYPES["[int32]"]),
    ("loss_mask", pa.list_(pa.uint8())),
    ("logprobs", _TYPES["[float32]"]),
)
_OF_TURNS = ("model", "harness")  # the names that occur in the turns, in order, joined by commas

SCHEMA = pa.schema(
    [
        ("session", pa.string()),
        ("complete", pa.bool_()),
        *(("sequence" if name == "id" else name, kind) for name, kind in _COLUMNS),
        *((name, pa.string()) for name in _OF_TURNS),
        ("turns", pa.string()),
        ("more", pa.string()),
        ("rollout", pa.string()),
    ]
)


def create(file: PartFile, wanted: Format) -> Sink:
    """Create a Parquet file for a format."""
    return _Native(file) if wanted.name == "native" else _Rows(file, wanted)


class _Groups:
    """Collects rows into row groups and writes them."""

    def __init__(self, file: PartFile, schema: pa.Schema) -> None:
        self.file = file
        self._schema = schema
        self._writer = pq.ParquetWriter(file.part, schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0
        self._digest = _RowsDigest(schema.names)

    def add(self, row: dict[str, Any], tokens: int) -> None:
        self._rows.append(row)
        self._digest.add(row)
        self._tokens += tokens
        if self._tokens >= GROUP_TOKENS or len(self._rows) >= GROUP_ROWS:
            self._flush()

    def close(self, metadata: Mapping[bytes, bytes] | None = None) -> None:
        """Write the end of the file.

        Raises:
            OSError: it cannot be written, perhaps because an earlier part could not.
        """
        try:
            self._flush()
            self._writer.add_key_value_metadata({**(metadata or {}), _DIGEST: self._digest.text.encode()})
            self._writer.close()
        except pa.ArrowInvalid as why:
            raise OSError(f"{self.file.part} has no end: {why}") from None

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows, self._tokens = [], 0


class _RowsDigest:
    """The digest of all rows of a file: the SHA-256 of their canonical JSON, one row a line, with every column in order of the schema."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._hash = hashlib.sha256()

    def add(self, row: Mapping[str, Any]) -> None:
        self._hash.update(canonical({name: row.get(name) for name in self._columns}) + b"\n")

    @property
    def text(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


class _Native:
    """Writes native rollouts, one row for each sequence."""

    def __init__(self, file: PartFile) -> None:
        self._groups = _Groups(file, SCHEMA)
        self._without_rows: list[Any] = []
        self.rows = 0

    def write(self, rollout: bytes) -> None:
        value = msgspec.json.decode(rollout)
        sequences = value.pop("sequences")
        if not sequences:
            self._without_rows.append(value)
        session = {"session": value["session"], "complete": value["complete"], "rollout": _text(value)}
        rows = [{**session, **_row(sequence, value["session"])} for sequence in sequences]  # all rows of a rollout, or none
        for row in rows:
            self._groups.add(row, row["tokens"])
        self.rows += len(rows)

    def finish(self) -> None:
        self._close()
        self._groups.file.publish()

    def leave(self) -> Path | None:
        try:
            self._close()
        finally:
            part = self._groups.file.leave()
        return part

    def _close(self) -> None:
        self._groups.close({_WITHOUT_ROWS: msgspec.json.encode(self._without_rows)})


def _row(sequence: dict[str, Any], session: str) -> dict[str, Any]:
    turns = sequence.pop("turns")
    row = {name: sequence.pop(name) for name, _ in _COLUMNS}
    row["sequence"] = row.pop("id")
    if not _is_single(row["logprobs"]):
        raise FileError(
            f"session {session}: its log probabilities do not fit into float32, which Parquet files use; write a .jsonl file instead"
        )
    for name in _OF_TURNS:
        row[name] = ",".join(dict.fromkeys(turn[name] for turn in turns if turn[name]))
    return {**row, "turns": _text(turns), "more": _text(sequence)}


def _is_single(values: Sequence[float | None]) -> bool:
    """Whether float32 holds every value exactly."""
    numbers = [value for value in values if value is not None]
    return array("f", numbers).tolist() == numbers


def read(path: Path) -> Iterator[Any]:
    """Read native rollouts, as the JSON values that were written. Rows of scores (`tokencache score`) are returned as they are.

    Raises:
        FileError: the file is not Parquet, or holds neither.
    """
    try:
        with pq.ParquetFile(path) as file:
            if any(name == "score" or name.startswith("score_") for name in file.schema_arrow.names):
                yield from (row for batch in file.iter_batches(batch_size=64) for row in batch.to_pylist())
                return
            if file.schema_arrow.names != SCHEMA.names:
                raise FileError(f"{path} does not hold native rollouts: its columns are {', '.join(file.schema_arrow.names)}")
            rows = (row for batch in file.iter_batches(batch_size=64) for row in batch.to_pylist())
            for _, own in groupby(rows, key=lambda row: row["rollout"]):
                yield _joined(list(own))
            without_rows = (file.metadata.metadata or {}).get(_WITHOUT_ROWS, b"[]")
            yield from ({**rollout, "sequences": []} for rollout in msgspec.json.decode(without_rows))
    except pa.ArrowInvalid as why:
        raise FileError(f"{path} cannot be read as Parquet: {why}") from None


class Inspection(NamedTuple):
    """What a Parquet file holds.

    Attributes:
        native: whether its rows are sequences of native rollouts.
        rows: number of rows.
        genuine: whether they are as they were written; `None` if the file has no digest.
    """

    native: bool
    rows: int
    genuine: bool | None


def inspect(path: Path) -> Inspection:
    """Read all rows of a file and compare them with its digest. Raises `FileError` if the file is not Parquet."""
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            digest = _RowsDigest(names)
            for row in (row for batch in file.iter_batches(batch_size=64) for row in batch.to_pylist()):
                digest.add(row)
            recorded = (file.metadata.metadata or {}).get(_DIGEST)
            return Inspection(names == SCHEMA.names, file.metadata.num_rows, None if recorded is None else recorded == digest.text.encode())
    except (pa.ArrowException, OSError) as why:
        raise FileError(f"{path} cannot be read as Parquet: {why}") from None


def _joined(rows: list[dict[str, Any]]) -> Any:
    """Put the rows of one rollout together."""
    sequences = []
    for row in rows:
        columns = {name: row["sequence" if name == "id" else name] for name, _ in _COLUMNS}
        sequences.append({**columns, **msgspec.json.decode(row["more"]), "turns": msgspec.json.decode(row["turns"])})
    return {**msgspec.json.decode(rows[0]["rollout"]), "sequences": sequences}


class _Rows:
    """Writes the rows of any other format: first to a temporary file, and as Parquet once all types are known."""

    def __init__(self, file: PartFile, wanted: Format) -> None:
        self._file = file
        self._format = wanted
        self._rows_file = tempfile.TemporaryFile(dir=file.path.parent)  # noqa: SIM115 - closed with the sink
        self._kinds: dict[str, str] = {}
        self.rows = 0

    def write(self, rollout: bytes) -> None:
        for raw in rows_of(rollout, self._format):
            row = msgspec.json.decode(raw)
            if not self.rows and "token_ids" not in row and not any(_kind(value) in _IDS for value in row.values()):
                words = f"format {self._format.name} has token ids only inside objects, which a Parquet file would hold as text"
                raise FileError(f"{words}: write a .jsonl file instead")
            for name, value in row.items():
                self._kinds[name] = self._widened(name, self._kinds.get(name, "null"), _kind(value))
            self._rows_file.write(bytes(raw) + b"\n")
            self.rows += 1

    def _widened(self, name: str, one: str, other: str) -> str:
        """Return the kind that holds the values of both."""
        if one == other or one in _WIDER.get(other, ()):
            return one
        if other in _WIDER.get(one, ()):
            return other
        if "object" in {one, other}:
            return "object"
        if {one, other} <= {"[int32]", "[int64]", "[float32]", "[float64]"}:
            return "[float64]"
        words = f"{name!r} is {one} in some rows of format {self._format.name} and {other} in others"
        raise FileError(f"{words}: a Parquet column cannot be both; write a .jsonl file instead")

    def finish(self) -> None:
        self._write_parquet()
        self._file.publish()

    def leave(self) -> Path | None:
        try:
            if not self._rows_file.closed:  # else writing them failed
                self._write_parquet()
        finally:
            part = self._file.leave()
        return part

    def _write_parquet(self) -> None:
        groups = _Groups(self._file, pa.schema([(name, _TYPES[kind]) for name, kind in self._kinds.items()]))
        texts = [name for name, kind in self._kinds.items() if kind == "object"]
        with self._rows_file:
            self._rows_file.seek(0)
            for line in self._rows_file:
                if not line.endswith(b"\n"):
                    break  # the disk was full
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
    if {type(one) for one in value} == {list}:
        inner = f"[{_kind_of_list([one for part in value for one in part])}]"
        return inner if inner in _TYPES else "object"
    return _kind_of_list(value)


def _kind_of_list(value: list[Any]) -> str:
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
    return msgspec.json.encode(value).decode()

"""`tokencache export` writes exactly what the proxy returns, names a file when it is complete, and deletes nothing before."""

import asyncio
import contextlib
import gzip
import hashlib
import json
import random
import resource
from array import array
from collections import Counter
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.core.forest import Forest, grow
from tests.trajectories.rollouts import ROLLOUTS, of_forest
from tokencache.client import Conditions, NotFoundError, UnfinishedError
from tokencache.client.errors import ClientError
from tokencache.commands import convert, files, parquet
from tokencache.commands.export import Export
from tokencache.commands.sink import FileError
from tokencache.trajectories.formats.registry import FORMATS
from tokencache.trajectories.lengths import POLICIES, Lengths
from tokencache.trajectories.limiting import limit

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


def written(made, name="native"):
    """A rollout as the proxy returns it."""
    return msgspec.json.encode(FORMATS[name].write(made))


def saved(path, rollouts, name="native"):
    return filled(files.create(str(path), FORMATS[name], overwrite=False), rollouts)


def filled(sink, rollouts):
    for rollout in rollouts:
        sink.write(rollout)
    sink.finish()
    return sink


def grown():
    """Random rollouts whose log probabilities use all digits of float32."""
    rng = random.Random(3)
    for n in range(20):
        forest = grow(rng)
        for turn in forest.turns:
            if forest.tokens[turn.id].logprobs:
                values = array("f", [-rng.expovariate(1) for _ in range(turn.completion_tokens)])
                forest.change(turn.id, logprobs=b"f" + values.tobytes() if values else b"")
        yield of_forest(forest, f"grown-{n}")


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_read_back_is_what_was_written(tmp_path, ending):
    rollouts = [*ROLLOUTS.values(), *grown()]
    path = tmp_path / f"all{ending}"
    sink = saved(path, [written(made) for made in rollouts])
    assert sink.rows == sum(len(made.sequences) for made in rollouts)
    read = {content["session"]: content for _, content in files.read(path)}
    assert read == {made.session: msgspec.json.decode(written(made)) for made in rollouts}


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    source = tmp_path / "a.jsonl"
    saved(source, [written(ROLLOUTS["linear"])])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_converted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert.convert_file(source, to=str(tmp_path / "b.jsonl"))
    assert [*tmp_path.iterdir()] == [source]


@contextlib.contextmanager
def full_disk(room):
    """No file can have more bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.product
@pytest.mark.parametrize("room", [0, 3000])
@pytest.mark.parametrize("name", ["native", "trl"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_full_disk_is_an_error_of_the_system_and_leaves_no_lock(tmp_path, ending, name, room):
    path, rollouts = tmp_path / f"a{ending}", [written(made, name) for made in ROLLOUTS.values()]
    sink = files.create(str(path), FORMATS[name], overwrite=False)
    with full_disk(room):
        with pytest.raises(OSError, match="File too large"):
            filled(sink, rollouts * 3)
        with contextlib.suppress(OSError):  # there may be no room for the end of the file either
            sink.leave()
    assert not path.exists()
    saved(path, rollouts, name)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ending", ENDINGS)
def test_limited_rollouts_are_read_back(tmp_path, ending, policy):
    rollouts = [limit(made, Lengths(policy, max_length=100)) for made in ROLLOUTS.values()]
    path = tmp_path / f"all{ending}"
    saved(path, [written(made) for made in rollouts])
    read = {content["session"]: content for _, content in files.read(path)}
    written_ = {made.session: msgspec.json.decode(written(made)) for made in rollouts if made.sequences or ending != ".parquet"}
    assert {name: read[name] for name in written_} == written_


def test_parquet_has_a_row_a_sequence_with_the_types_of_a_trainer(tmp_path):
    path = tmp_path / "a.parquet"
    made = ROLLOUTS["thrown-away"]
    saved(path, [written(made)])
    table = pq.read_table(path)
    types = {name: table.schema.field(name).type for name in ("token_ids", "loss_mask", "logprobs", "weight", "complete", "tools")}
    assert [str(one.value_type) for one in list(types.values())[:3]] == ["int32", "uint8", "float"]
    assert (types["weight"], types["complete"], types["tools"]) == (pa.float64(), pa.bool_(), pa.int32())
    rows = table.to_pylist()
    for row, sequence, weight in zip(rows, made.sequences, made.weights, strict=True):
        assert (row["session"], row["sequence"], row["parent"]) == (made.session, sequence.id, sequence.parent)
        assert (row["start"], row["reason"], row["continued"]) == (sequence.start, sequence.reason, sequence.continued)
        assert (row["token_ids"], row["loss_mask"]) == (sequence.token_ids, sequence.loss_mask)
        assert array("f", row["logprobs"]).tobytes() == array("f", sequence.logprobs).tobytes()
        assert (row["weight"], row["model"]) == (weight, "qwen3")
        assert [turn["turn"] for turn in msgspec.json.decode(row["turns"])] == [span.turn.id for span in sequence.turns]


def test_a_member_without_a_column_is_kept(tmp_path):
    content = msgspec.json.decode(written(ROLLOUTS["linear"]))
    content["later"] = {"a": 1}
    content["sequences"][0]["later"] = [1, "b"]
    saved(tmp_path / "a.parquet", [msgspec.json.encode(content)])
    assert [read for _, read in files.read(tmp_path / "a.parquet")] == [content]


def test_row_groups_stay_small(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "GROUP_TOKENS", 200)
    rollouts = [written(made) for made in ROLLOUTS.values()]
    saved(tmp_path / "a.parquet", rollouts)
    with pq.ParquetFile(tmp_path / "a.parquet") as file:
        groups = [file.read_row_group(n, ["token_ids"]).to_pylist() for n in range(file.num_row_groups)]
    assert len(groups) > 3
    for group in groups:
        assert sum(len(row["token_ids"]) for row in group[:-1]) < 200
    assert len(list(files.read(tmp_path / "a.parquet"))) == len(rollouts)


def test_log_probabilities_finer_than_float32_are_not_rounded(tmp_path):
    forest = Forest()
    forest.add([1], [2, 3], logprobs=[-0.1, -0.2])  # float64 values
    rollout = written(of_forest(forest))
    with pytest.raises(FileError, match=r"do not fit into float32.*write a \.jsonl file"):
        saved(tmp_path / "a.parquet", [rollout])
    saved(tmp_path / "a.jsonl", [rollout])
    ((_, content),) = files.read(tmp_path / "a.jsonl")
    assert content["sequences"][0]["logprobs"] == [0.0, -0.1, -0.2]


@pytest.mark.parametrize("name", ["trl", "verl", "slime"])
def test_rows_of_other_formats(tmp_path, name):
    rollouts = [written(made, name) for made in ROLLOUTS.values()]
    rows = [row for rollout in rollouts for row in msgspec.json.decode(rollout)[FORMATS[name].rows]]
    sink = saved(tmp_path / "a.jsonl", rollouts, name)
    assert [msgspec.json.decode(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()] == rows
    assert sink.rows == len(rows)
    saved(tmp_path / "a.parquet", rollouts, name)
    table = pq.read_table(tmp_path / "a.parquet")
    lists = {field.name: str(field.type.value_type) for field in table.schema if pa.types.is_list(field.type)}
    assert {"int32", "float"} <= set(lists.values()) <= {"int32", "float", "string"}
    texts = {key for content in rows for key, value in content.items() if isinstance(value, dict)} | {"prompt"} - {*lists}
    for row, content in zip(table.to_pylist(), rows, strict=True):
        assert {key: msgspec.json.decode(value) if key in texts else value for key, value in row.items()} == content


def test_a_format_of_objects_only_needs_jsonl(tmp_path):
    with pytest.raises(FileError, match=r"format tinker .*write a \.jsonl file"):
        saved(tmp_path / "a.parquet", [written(ROLLOUTS["linear"], "tinker")], "tinker")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([[1], [2**31]], "list<element: int64>"),
        ([[], [-0.5]], "list<element: float>"),
        ([[-0.1], [-0.5]], "list<element: double>"),
        ([[1], None], "list<element: int32>"),
        ([["a"], []], "list<element: string>"),
        ([None, 1, 0.5], "double"),
        ([{"a": 1}, [{"b": 2}], ""], "string"),
    ],
)
def test_the_type_of_a_column_holds_all_its_values(tmp_path, values, kind):
    rollout = msgspec.json.encode({"rows": [{"ids": [1], "x": value} for value in values]})
    saved(tmp_path / "a.parquet", [rollout], "trl")
    assert str(pq.read_schema(tmp_path / "a.parquet").field("x").type) == kind
    read = [row["x"] for row in pq.read_table(tmp_path / "a.parquet").to_pylist()]
    assert (read if kind != "string" else [msgspec.json.decode(x) for x in read]) == values


def test_a_column_of_incompatible_types_is_refused(tmp_path):
    rollout = msgspec.json.encode({"rows": [{"ids": [1], "x": "a"}, {"ids": [1], "x": 1}]})
    with pytest.raises(FileError, match=r"'x' is str in some rows of format trl and int in others.*\.jsonl"):
        saved(tmp_path / "a.parquet", [rollout], "trl")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_has_its_name_only_when_it_is_whole(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    sink = files.create(str(path), FORMATS["native"], overwrite=False)
    sink.write(written(ROLLOUTS["linear"]))
    assert not path.exists()
    partial = sink.leave()
    assert partial == tmp_path / f"a{ending}.part"
    assert not path.exists()
    assert [content["session"] for _, content in files.read(partial)] == ["linear"], "what was written can be read"


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_is_written_by_one_export_at_a_time(tmp_path, ending):
    path = str(tmp_path / f"a{ending}")
    first = files.create(path, FORMATS["native"], overwrite=False)
    first.write(written(ROLLOUTS["linear"]))
    with pytest.raises(FileError, match=rf"a{ending}\.part is being written by another process"):
        files.create(path, FORMATS["native"], overwrite=True)
    first.finish()
    assert [content["session"] for _, content in files.read(Path(path))] == ["linear"]
    for end in ("leave", "finish"):  # what an interrupted export left is replaced
        later = files.create(path, FORMATS["native"], overwrite=True)
        later.write(written(ROLLOUTS["choices"]))
        getattr(later, end)()
    assert [content["session"] for _, content in files.read(Path(path))] == ["choices"]
    assert [*tmp_path.iterdir()] == [Path(path)]


def test_an_existing_file_is_replaced_only_on_request(tmp_path):
    path = tmp_path / "a.jsonl"
    saved(path, [written(ROLLOUTS["linear"])])
    with pytest.raises(FileError, match="exists already"):
        files.create(str(path), FORMATS["native"], overwrite=False)
    sink = files.create(str(path), FORMATS["native"], overwrite=True)
    assert [content["session"] for _, content in files.read(path)] == ["linear"], "until the new one is whole"
    sink.write(written(ROLLOUTS["choices"]))
    sink.finish()
    assert [content["session"] for _, content in files.read(path)] == ["choices"]


@pytest.mark.parametrize(("name", "words"), [("a.csv", "must end with"), ("no/such/a.jsonl", "there is no directory")])
def test_invalid_file_names(tmp_path, name, words):
    with pytest.raises(FileError, match=words):
        files.create(str(tmp_path / name), FORMATS["native"], overwrite=False)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", b'{"session": "a"}\n{"sess', "line 2: not valid JSON"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 10_000, mtime=0)[:-20], "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, "cannot be read"),
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
        ("a.json", b"", "not valid JSON"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FileError, match=words):
        list(files.read(tmp_path / name))


def test_parquet_of_another_format_is_refused(tmp_path):
    saved(tmp_path / "a.parquet", [written(ROLLOUTS["linear"], "trl")], "trl")
    with pytest.raises(FileError, match="does not hold native rollouts: its columns are prompt_ids"):
        list(files.read(tmp_path / "a.parquet"))


# many sessions


CONDITIONS = Conditions(version="9", python="3", settings={"history": "follow"}, settings_digest="d", adapters={"pi": "a"}, engines=[])


class Proxy:
    """A fake client: sessions by name, and the operations on them, in order."""

    def __init__(self, *names):
        self.rollouts = {name: ROLLOUTS[name] for name in names}
        self.deeds = []
        self.open = set()
        self.sealed = set()
        self.fetching = self.most = 0
        self.failing = ""
        self.older = False

    def session(self, name):
        return _Session(self, name)

    async def conditions(self):
        if self.older:
            raise NotFoundError("there is no such route", status=404)
        return CONDITIONS


class _Session:
    def __init__(self, proxy, name):
        self.proxy, self.name = proxy, name

    async def _do(self, deed):
        await asyncio.sleep(0)
        if self.name not in self.proxy.rollouts:
            raise NotFoundError(f"there is no session {self.name!r}", status=404)
        self.proxy.deeds.append((deed, self.name))

    async def seal(self, *, force):
        await self._do("seal")
        if self.name in self.proxy.open and not force:
            raise UnfinishedError("it has a call in flight")
        self.proxy.sealed.add(self.name)

    async def media(self):
        await self._do("media")
        return []

    async def delete(self):
        await self._do("delete")

    async def state(self):
        await self._do("state")
        made = self.proxy.rollouts[self.name]
        state = msgspec.defstruct("State", ["complete", "open_calls", "sealed", "harness", "model"])
        open_calls = ["c"] if self.name in self.proxy.open else []
        return state(made.complete, open_calls, self.name in self.proxy.sealed, "pi" if self.name == "lost" else "", "m")

    async def fetch_json(self, form, *, drift):
        self.proxy.fetching += 1
        self.proxy.most = max(self.proxy.most, self.proxy.fetching)
        await self._do("fetch")
        await asyncio.sleep(0)
        self.proxy.fetching -= 1
        if self.name == self.proxy.failing:
            raise ClientError("nobody answers")
        return written(self.proxy.rollouts[self.name], form)


NAMES = ["linear", "thrown-away", "sub-agent", "respliced", "choices", "lost", "cut-off", "empty"]


async def exported(proxy, path, names=NAMES, **more):
    export = Export(names=names, format="native", **more)
    steps = []
    await export.run(proxy, files.create(str(path), FORMATS["native"], overwrite=False), lambda: steps.append(1))
    assert len(steps) == len(names)
    return export


async def test_sessions_are_written_in_order_and_fetched_concurrently(tmp_path):
    proxy = Proxy(*NAMES)
    export = await exported(proxy, tmp_path / "a.jsonl")
    assert [content["session"] for _, content in files.read(tmp_path / "a.jsonl")] == NAMES == export.exported
    assert 1 < proxy.most <= 4
    assert export.incomplete == ["lost"]
    assert export.tokens == sum(len(s.token_ids) for name in NAMES for s in ROLLOUTS[name].sequences)
    assert {deed for deed, _ in proxy.deeds} == {"state", "fetch"}


async def test_incomplete_sessions_can_be_left_out(tmp_path):
    export = await exported(Proxy(*NAMES), tmp_path / "a.jsonl", complete_only=True)
    assert export.skipped == ["lost"]
    assert "lost" not in [content["session"] for _, content in files.read(tmp_path / "a.jsonl")]


async def test_only_written_and_finished_sessions_are_deleted(tmp_path, monkeypatch):
    proxy = Proxy(*NAMES)
    proxy.open = {"choices"}
    whole = []
    delete = _Session.delete

    async def watched(self):
        whole.append((tmp_path / "a.jsonl").exists())
        await delete(self)

    monkeypatch.setattr(_Session, "delete", watched)
    export = await exported(proxy, tmp_path / "a.jsonl", delete=True, complete_only=True)
    assert export.deleted == [name for name in NAMES if name not in {"lost", "choices"}]
    assert export.kept == ["choices"]
    assert whole
    assert all(whole), "the file was whole before the first was deleted"
    for name in NAMES:
        deeds = [deed for deed, of in proxy.deeds if of == name]
        assert deeds[:3] == ["seal", "state", "fetch"]


async def test_nothing_is_deleted_when_the_export_fails(tmp_path):
    proxy = Proxy(*NAMES)
    proxy.failing = "respliced"
    export = Export(names=NAMES, format="native", delete=True)
    with pytest.raises(ClientError):
        await export.run(proxy, files.create(str(tmp_path / "a.jsonl"), FORMATS["native"], overwrite=False), lambda: None)
    assert not [deed for deed in proxy.deeds if deed[0] == "delete"]
    assert export.partial == tmp_path / "a.jsonl.part"
    assert [content["session"] for _, content in files.read(export.partial)] == NAMES[:3]
    assert not (tmp_path / "a.jsonl").exists()


async def test_an_interrupted_export_leaves_its_data(tmp_path):
    proxy, reached = Proxy(*NAMES), asyncio.Event()
    export = Export(names=NAMES, format="native", delete=True)
    sink = files.create(str(tmp_path / "a.parquet"), FORMATS["native"], overwrite=False)
    work = asyncio.create_task(export.run(proxy, sink, reached.set))
    await reached.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert [content["session"] for _, content in files.read(export.partial)] == export.exported
    assert 0 < len(export.exported) < len(NAMES)
    assert not [deed for deed in proxy.deeds if deed[0] == "delete"]


async def test_a_deleted_session_is_counted_unless_it_was_named(tmp_path):
    proxy = Proxy("linear", "choices")
    export = await exported(proxy, tmp_path / "a.jsonl", ["linear", "gone", "choices"])
    assert (export.exported, export.gone) == (["linear", "choices"], ["gone"])
    with pytest.raises(NotFoundError):
        await exported(proxy, tmp_path / "b.jsonl", ["linear", "gone"], exact=True)


async def test_a_session_that_someone_else_deleted_counts_as_deleted(tmp_path, monkeypatch):
    proxy = Proxy("linear", "choices")

    async def gone(self):
        raise NotFoundError("there is no session", status=404)

    monkeypatch.setattr(_Session, "delete", gone)
    export = await exported(proxy, tmp_path / "a.jsonl", ["linear", "choices"], delete=True)
    assert export.whole
    assert export.deleted == ["linear", "choices"]


def manifest_of(path):
    return json.loads(path.with_name(path.name + ".manifest.json").read_text())


async def test_the_manifest_says_what_the_file_holds_and_under_which_conditions(tmp_path):
    path, names = tmp_path / "a.jsonl", [*NAMES, "never-was"]
    export = await exported(Proxy(*NAMES), path, names, complete_only=True, file=path)
    found = manifest_of(path)
    content = path.read_bytes()
    rollouts = [json.loads(line) for line in content.splitlines()]
    assert found["file"] == {"name": "a.jsonl", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert (found["format"], found["options"]["complete_only"]) == ("native", True)
    assert found["rows"] == sum(len(rollout["sequences"]) for rollout in rollouts)
    gone = {"incomplete": [], "failed": ["empty"], "left_out": ["lost"], "gone": ["never-was"]}
    assert found["sessions"] == {"requested": len(names), "exported": len(export.exported)} | gone
    for name in ("turns", "trainable_tokens", "masked_tokens"):
        assert found["figures"][name] == sum(rollout["figures"][name] for rollout in rollouts) > 0
    matches = Counter()
    for rollout in rollouts:
        matches.update(rollout["figures"]["matches"])
    assert found["figures"]["matches"] == matches
    assert (found["figures"]["harnesses"], found["figures"]["models"]) == ({"unknown": 7}, {"m": 7})
    assert found["proxy"] == json.loads(msgspec.json.encode(CONDITIONS))


async def test_an_older_proxy_has_no_conditions(tmp_path):
    path, proxy = tmp_path / "a.jsonl", Proxy("linear")
    proxy.older = True
    await exported(proxy, path, ["linear"], file=path)
    assert manifest_of(path)["proxy"] is None


async def test_nothing_is_deleted_before_the_manifest_is_written(tmp_path, monkeypatch):
    path, proxy = tmp_path / "a.jsonl", Proxy("linear")

    def fail(*_):
        raise OSError("no room for the manifest")

    monkeypatch.setattr("tokencache.commands.manifest.write_whole", fail)
    with pytest.raises(OSError, match="manifest"):
        await exported(proxy, path, ["linear"], file=path, delete=True)
    assert path.exists()
    assert "delete" not in {deed for deed, _ in proxy.deeds}

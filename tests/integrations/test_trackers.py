"""Figures of a run in Weights & Biases, MLflow and TensorBoard: the real packages, offline, read back what was logged.

`make integrations` runs these tests in an environment that has the packages.
"""

import asyncio
import importlib.util
import struct

import pytest

from tests.api.test_lifecycle import SESSIONS, call
from tests.proxy.kit import proxied, user
from tests.support.material import require
from tokencache.client import Client, NotFoundError
from tokencache.integrations.trackers import MlflowCallback, TensorBoardCallback, WandbCallback

EXTRAS = {"wandb": WandbCallback, "mlflow": MlflowCallback, "tensorboard": TensorBoardCallback}


def installed(name):
    return require(name, importlib.util.find_spec(name))


@pytest.fixture
async def proxy():
    """A proxy with a run: one rollout with the reward 1, one with 0, and one that failed."""
    async with proxied() as rig:
        for session, finish in {"a": {"reward": 1.0}, "b": {"reward": 0.0}, "c": {"reward": 0.0, "failed": "sandbox"}}.items():
            await call(rig, "POST", SESSIONS, {"session": session, "tags": ["run:r"]})
            await rig.post(session, messages=[user("EPISODE:talk")])
            await call(rig, "POST", f"{SESSIONS}/{session}/finish", finish)
        yield rig


@pytest.fixture
def client(proxy):
    with Client(proxy.url) as made:
        yield made


async def logged(callback):
    """Log two steps, and return the figures of both."""
    return [(await asyncio.to_thread(callback, step)).metrics() for step in (3, 7)]


def check(read, figures):
    """What was read back is what the report says, within the precision of 32 bits."""
    assert read == pytest.approx({f"tokencache/{name}": value for name, value in figures.items()}, rel=1e-6)
    assert (read["tokencache/reward/mean"], read["tokencache/failed/sandbox"], read["tokencache/rollouts/valid"]) == (0.5, 1, 2)


def records_of(data):
    """The records of an offline run. The form is that of LevelDB's log, after a header of 7 bytes; wandb has no reader for Python."""
    block, header, at, parts = 32768, struct.Struct("<IHB"), 7, []
    while at + header.size <= len(data):
        if block - at % block < header.size:  # padding
            at += block - at % block
            continue
        _, length, kind = header.unpack_from(data, at)
        parts.append(data[at + header.size : at + header.size + length])
        at += header.size + length
        if kind in {1, 4}:  # whole, or the last part
            yield b"".join(parts)
            parts = []


async def test_wandb(client, tmp_path, monkeypatch):
    installed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb
    from wandb.proto import wandb_internal_pb2

    with pytest.raises(RuntimeError, match=r"call wandb\.init\(\) first"):
        WandbCallback(client, "r")
    with wandb.init(project="p", dir=tmp_path, mode="offline") as run:
        run.log({"loss": 0.5}, step=100)  # a trainer's own step, which is later
        figures = await logged(WandbCallback(client, "r"))
    wandb.teardown()  # ends its process
    (file,) = tmp_path.rglob("*.wandb")
    records = map(wandb_internal_pb2.Record.FromString, records_of(file.read_bytes()))
    rows = [{"/".join(item.nested_key) or item.key: float(item.value_json) for item in one.history.item} for one in records]
    found = [row for row in rows if "tokencache/step" in row]
    assert [row.pop("tokencache/step") for row in found] == [3, 7]
    for row, of_step in zip(found, figures, strict=True):
        check({name: value for name, value in row.items() if name.startswith("tokencache/")}, of_step)


async def test_mlflow(client, tmp_path, monkeypatch):
    installed("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("e")
    with mlflow.start_run() as run:
        figures = await logged(MlflowCallback(client, "r", into=run.info.run_id))
    store = mlflow.MlflowClient()
    for step, of_step in zip((3, 7), figures, strict=True):
        names = [f"tokencache/{name}" for name in of_step]
        read = {name: metric.value for name in names for metric in store.get_metric_history(run.info.run_id, name) if metric.step == step}
        check(read, of_step)


async def test_tensorboard(client, tmp_path):
    installed("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = TensorBoardCallback(client, "r", into=tmp_path)
    figures = await logged(callback)
    callback.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    for step, of_step in zip((3, 7), figures, strict=True):
        read = {name: one.value for name in events.Tags()["scalars"] for one in events.Scalars(name) if one.step == step}
        check(read, of_step)


async def test_an_unknown_run_is_an_error(client, tmp_path):
    installed("tensorboard")
    with pytest.raises(NotFoundError, match="no session is in run 'none'"):
        await asyncio.to_thread(TensorBoardCallback(client, "none", into=tmp_path), 1)


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_package_is_a_clear_error(extra):
    if importlib.util.find_spec(extra):
        pytest.skip(f"{extra} is installed")
    options = {"into": "folder"} if extra == "tensorboard" else {}
    with pytest.raises(ModuleNotFoundError, match=rf"needs the extra '{extra}'.*pip install '\.\[{extra}\]'"):
        EXTRAS[extra](None, "r", **options)

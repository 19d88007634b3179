"""A format that is defined outside the package: one function and one entry in the table. The API and the export file use it."""

import asyncio

import msgspec
import pytest
from typer.testing import CliRunner

from tests.proxy.kit import proxied, user
from tests.trajectories.rollouts import SESSIONS
from tokencache.api.export_worker import LARGE, ExportWorker
from tokencache.cli import app
from tokencache.trajectories.formats.registry import FORMATS, Format, export
from tokencache.trajectories.formats.rows import rows_of, session_object


def toy(rollout):
    """Write each sequence as one string of ids."""
    return {**session_object(rollout), "strings": [{"ids": " ".join(map(str, row.sequence.token_ids))} for row in rows_of(rollout)]}


TOY = Format("toy", "a test: ids as strings", toy, "strings")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(FORMATS, TOY.name, TOY)


async def test_the_api_exports_it(tmp_path):
    async with proxied() as rig:
        await rig.say("s", [user("EPISODE:talk")])
        path = "/tokencache/v1/sessions/s/trajectories"
        native, written = await rig.get(path), await rig.get(f"{path}?format=toy")
        (sequence,) = native["sequences"]
        assert written["complete"]
        assert written["strings"] == [{"ids": " ".join(map(str, sequence["token_ids"]))}]

        file = tmp_path / "toy.jsonl"
        command = ["export", "s", "--format", "toy", "--to", str(file), "--proxy", rig.url]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert result.exit_code == 0, result.output
        assert [msgspec.json.decode(line) for line in file.read_bytes().splitlines()] == written["strings"]


async def test_the_worker_process_exports_it():
    worker = ExportWorker()
    try:
        assert await worker.run(LARGE, export, SESSIONS["linear"], TOY) == export(SESSIONS["linear"], TOY)
    finally:
        await worker.close()

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
from tokencache.trajectories.formats.rows import ExportedRow, ExportedTokens, rows_of, session_object
from tokencache.trajectories.verify_rows import verify_row


def toy(rollout):
    """Write the ids of each sequence as one string."""
    return {**session_object(rollout), "strings": [_string(row) for row in rows_of(rollout)]}


def _string(row):
    s = row.sequence
    return {"string": " ".join(map(str, s.token_ids)), "mask": s.loss_mask, "logprobs": s.logprobs, "tokencache": row.labels}


def read_toy(row):
    """Read the ids back, as a response without a prompt."""
    return [ExportedRow(row["tokencache"], ExportedTokens([], [*map(int, row["string"].split())], row["mask"], row["logprobs"]))]


TOY = Format("toy", "a test: ids as strings", toy, "strings", member="string", read=read_toy)


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
        assert [row["string"] for row in written["strings"]] == [" ".join(map(str, sequence["token_ids"]))]

        file = tmp_path / "toy.jsonl"
        command = ["export", "s", "--format", "toy", "--to", str(file), "--proxy", rig.url]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert result.exit_code == 0, result.output
        assert [msgspec.json.decode(line) for line in file.read_bytes().splitlines()] == written["strings"]


@pytest.mark.whole
async def test_the_worker_process_exports_it():
    worker = ExportWorker()
    try:
        assert await worker.run(LARGE, export, SESSIONS["linear"], TOY) == export(SESSIONS["linear"], TOY)
    finally:
        await worker.close()


def test_verify_checks_its_rows():
    (row,) = msgspec.json.decode(export(SESSIONS["linear"], TOY))["strings"]
    assert (verify_row(row).failures, verify_row(row).turns) == ([], 3)
    first, _, others = row["string"].partition(" ")
    row["string"] = f"{int(first) + 1} {others}"
    assert {failure.check for failure in verify_row(row).failures} == {"hashes", "digest"}

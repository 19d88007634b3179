"""`tokencache media`, and exports of sessions with images."""

import asyncio
import json
import os
import threading

import pytest

from tests.commands.test_commands import Shell, record
from tests.images import image
from tests.media import BLUE, RED, described, put
from tests.proxy.kit import proxied, user
from tests.support.plugin_engine import PluginEngine
from tokencache.commands.media import write_media
from tokencache.core.media import StoredMedium


@pytest.fixture
async def shell():
    async with proxied() as rig:
        for name in ("a", "b"):
            await record(rig, name, 1)
        await put(rig.store, "a", RED, b"?", media_type="image/png")
        await put(rig.store, "b", RED, BLUE)
        yield Shell(rig)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_the_media_of_sessions_become_files_named_by_their_digests(shell, tmp_path):
    out = tmp_path / "new" / "media"
    report = (await shell("media", "a", "b", "--out", str(out))).stdout
    assert report.startswith("4 files of 2 sessions")
    assert files(out) == {f"{described(content).sha256}.png": content for content in (RED, b"?", BLUE)}


async def test_a_file_that_exists_is_not_fetched_again(shell, tmp_path):
    kept = tmp_path / f"{described(RED).sha256}.png"
    kept.write_bytes(b"here already")
    await shell("media", "b", "--out", str(tmp_path))
    assert kept.read_bytes() == b"here already"
    assert (tmp_path / f"{described(BLUE).sha256}.png").read_bytes() == BLUE


async def test_two_exports_write_the_same_file(tmp_path, monkeypatch):
    """The second begins while the first has written the file, but has not given it its name."""
    flush, others = os.fsync, [1]

    class Session:
        async def media(self):
            return [StoredMedium("0" * 64, "image/png", 5)]

        async def medium(self, _):
            return b"bytes"

    def begin_another(descriptor):
        if others:
            others.pop()
            other = threading.Thread(target=asyncio.run, args=(write_media(Session(), tmp_path),))
            other.start()
            other.join()
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", begin_another)
    assert await write_media(Session(), tmp_path) == (1, 5)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(f"{'0' * 64}.png", b"bytes")]


async def test_errors(shell, tmp_path):
    assert "there is no session 'nope'" in (await shell("media", "nope", "--out", str(tmp_path), code=1)).stderr
    (tmp_path / "file").write_text("")
    assert "file" in (await shell("media", "a", "--out", str(tmp_path / "file"), code=1)).stderr


async def test_an_export_deletes_no_session_whose_images_it_does_not_write(shell, tmp_path):
    await record(shell.rig, "plain", 1)
    for name in ("a", "b", "plain"):
        await shell("finish", name)
    report = (await shell("export", "--all", "--delete", "--to", str(tmp_path / "r.jsonl"))).stderr
    assert "2 not deleted" in report
    assert "--media DIR" in report
    assert {info.id async for info in shell.rig.store.sessions()} == {"a", "b"}
    report = (await shell("export", "--all", "--delete", "--media", str(tmp_path / "media"), "--to", str(tmp_path / "s.jsonl"))).stderr
    assert "2 deleted" in report
    assert len(files(tmp_path / "media")) == 3
    assert [info.id async for info in shell.rig.store.sessions()] == []


async def test_export_says_that_nothing_is_trained_of_images_whose_places_are_not_known(tmp_path):
    async with proxied(PluginEngine(images="stock")) as rig:
        shell = Shell(rig)
        await rig.say("seeing", [user([{"type": "text", "text": "Look."}, image(0)])])
        result = await shell("export", "seeing", "--to", str(tmp_path / "a.jsonl"), "--format", "verl")
        assert "1 sequence masked: which of their tokens stand for images is not known" in " ".join(result.stderr.split())
        (row,) = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
        assert sum(row["response_mask"]) == 0
        await shell("verify", str(tmp_path / "a.jsonl"), far=False)

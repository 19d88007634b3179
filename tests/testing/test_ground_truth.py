"""The ground-truth log file equals the engine's ground truth, also if the engine is killed in the middle of a stream."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request

import aiohttp
import pytest

from tokencache.testing import GroundTruthEntry, SimulatedEngine
from tokencache.testing.faults import FaultOrders
from tokencache.testing.ground_truth import GroundTruthLog, read_ground_truth

CHAT = "/v1/chat/completions"


def body(text, **more):
    return {"model": "sim", "messages": [{"role": "user", "content": text}], **more}


@pytest.mark.parametrize("stream", [True, False])
async def test_the_file_equals_the_ground_truth(tmp_path, stream):
    engine = SimulatedEngine(journal=tmp_path / "log.jsonl")
    async with engine.serve() as url, aiohttp.ClientSession() as http:
        for text in ("one", "two"):
            async with http.post(url + CHAT, json=body(text, stream=stream, n=2), headers={"X-Session-ID": "s"}) as answer:
                await answer.read()
        async with http.post(f"{url}/v1/completions", json={"model": "sim", "prompt": "three", "stream": stream}) as answer:
            await answer.read()
    assert len(engine.ground_truth) == 5
    assert read_ground_truth(tmp_path / "log.jsonl") == engine.ground_truth


def test_two_engines_share_a_file_and_an_incomplete_line_is_skipped(tmp_path):
    path = tmp_path / "log.jsonl"
    entries = [GroundTruthEntry(f"r{n}", 0, "s", "sim", True, False, [1, 2]) for n in range(2)]
    journal = GroundTruthLog(path)
    for grown in range(3):
        for entry in entries:
            entry.completion_ids.append(grown)
            entry.logprobs.append(-0.5)
            journal.append(entry)
    with path.open("ab") as file:
        file.write(b'{"entry": "torn", "ids": [')
    assert read_ground_truth(path) == entries
    assert read_ground_truth(tmp_path / "never written") == []


def test_a_killed_engine_has_logged_what_it_sent(tmp_path):
    path = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "tokencache.testing.engine", "--journal", str(path), "--token-delay", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        url = engine.stdout.readline().strip()
        data = json.dumps(body("x", stream=True, return_token_ids=True)).encode()
        asked = urllib.request.Request(url + CHAT, data, {"Content-Type": "application/json"})  # noqa: S310 - loopback
        heard = []
        with urllib.request.urlopen(asked) as answer:  # noqa: S310
            while len(heard) < 5:
                line = answer.readline()
                if line.startswith(b"data:"):
                    heard += json.loads(line[5:])["choices"][0].get("token_ids") or []
            engine.send_signal(signal.SIGKILL)
            engine.wait()
    (entry,) = read_ground_truth(path)
    assert entry.completion_ids[: len(heard)] == heard
    assert entry.finish_reason is None
    assert len(entry.logprobs) == len(entry.completion_ids)


async def test_faults_are_ordered_over_http(tmp_path):
    async with SimulatedEngine(orders=FaultOrders()).serve() as url, aiohttp.ClientSession() as http:

        async def ask(text):
            async with http.post(url + CHAT, json=body(text)) as answer:
                return answer.status

        orders = [{"kind": "status", "status": 429, "body": "{}", "words": "seven"}, {"kind": "status", "status": 500}]
        async with http.post(f"{url}/control/faults", json=orders) as answer:
            assert await answer.json() == {"waiting": 2}
        assert [await ask("seven"), await ask("eight"), await ask("seven")] == [429, 500, 200]
        async with http.post(f"{url}/control/faults", json=orders) as answer:
            assert answer.status == 200
        async with http.delete(f"{url}/control/faults") as answer:
            assert await answer.json() == {"waiting": 0}
        assert await ask("seven") == 200

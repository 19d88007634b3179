"""The mock engine with the plugin: it takes prompts by hash, so that the proxy's cost in front of it is that of such calls."""

import asyncio
import json

from bench import mock
from bench.talk import Talk
from tests.bench.conftest import RecordingEngine
from tests.proxy.kit import proxied


async def test_sessions_continue_by_hash(asked):
    kept = mock.kept_prompts()
    server = await asyncio.get_running_loop().create_server(lambda: RecordingEngine(kept), "127.0.0.1", 0)
    async with proxied(upstream=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as rig:
        talk, sizes = Talk("s", size=20_000, messages=20, mock_tokens=50), []
        for _ in range(4):
            status, said = await rig.post("s", **json.loads(talk.body()))
            assert status == 200
            talk.add_turn(said["choices"][0]["message"]["content"], 200)
            sizes.append(len([body for path, body in asked if path == b"/v1/chat/completions"][-1]))
        turns = await rig.turns()
        assert [turn["match"] for turn in turns] == ["root", "continue", "continue", "continue"]
        assert [turn["completion_tokens"] for turn in turns] == [50] * 4
        assert sizes[0] > 15_000
        assert max(sizes[1:]) < 2_000
        assert (await rig.info())["incidents"] == []
    server.close()

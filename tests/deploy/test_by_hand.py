"""Runs the containers' commands without containers, with the environments and health checks of compose file and image.

The package is built and installed as the Dockerfile does it. The proxy then runs as in its container: with a working directory and a home
that it cannot write to, and with a limit that forbids writing any file, as on a read-only root.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import aiohttp
import pytest

from tests.deploy import reading
from tests.ports import free_port
from tests.proxy.kit import CHAT, EPISODES, HEADER, echo, results, user
from tests.support.material import require
from tests.support.redis_server import find_binary
from tests.support.waiting import PATIENCE, until
from tokencache.api.export_worker import LARGE
from tokencache.store.redis import RedisStore
from tokencache.testing import SimulatedEngine


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A fresh virtual environment with only the built wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("image")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=reading.ROOT, check=True, capture_output=True, timeout=PATIENCE)
    (wheel,) = folder.glob("*.whl")
    uv = Path(sys.executable).with_name("uv")  # ten times less work than pip's
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder / "venv"], check=True, timeout=PATIENCE)
    install = [uv, "pip", "install", "--quiet", "--python", folder / "venv", "--constraint", reading.ROOT / "requirements.lock", wheel]
    subprocess.run(install, check=True, capture_output=True)
    return folder / "venv" / "bin"


class Container:
    """A service of the compose file, as a process of this machine.

    `elsewhere`: replacements in its command, environment and health check, such as names of hosts and paths.
    """

    def __init__(self, service, *, folder: Path, path: str, elsewhere: dict[str, str], writes: bool, image=((), ())) -> None:
        entry, variables = image
        self._elsewhere, self._folder, self._writes = elsewhere, folder, writes
        given = {name: value for name, value in service.get("environment", {}).items() if value is not None}
        environment = {**dict(variables), **given}
        self._environment = {name: self._here(value) for name, value in environment.items()} | {"PATH": path, "HOME": str(folder)}
        self._command = [self._here(word) for word in (*entry, *service["command"])]
        self._check = service["healthcheck"]["test"]
        self.process: asyncio.subprocess.Process | None = None

    def _here(self, text: str) -> str:
        for there, here in self._elsewhere.items():
            text = text.replace(there, here)
        return text

    def _limit(self) -> None:
        if not self._writes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    async def _start(self, *command: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=self._limit,
        )

    async def __aenter__(self) -> Self:
        self.process = await self._start(*self._command)
        return self

    async def __aexit__(self, *why: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.communicate()

    async def well(self) -> bool:
        """Runs the container's health check."""
        assert self.process.returncode is None, (await self.process.communicate())[0].decode()
        kind, *words = self._check
        words = [self._here(word) for word in words]
        asked = await self._start(*(words if kind == "CMD" else ("sh", "-c", *words)))
        await asyncio.wait_for(asked.communicate(), PATIENCE)
        return asked.returncode == 0

    async def ended(self) -> tuple[int | None, str]:
        """Waits for its end; returns its exit code, and all its output."""
        printed, _ = await asyncio.wait_for(self.process.communicate(), PATIENCE)
        return self.process.returncode, printed.decode()


@pytest.mark.whole
@pytest.mark.redis
async def test_the_containers_commands(installed, tmp_path):
    services = reading.compose(TOKENCACHE_ADMIN_KEY=reading.KEY)["services"]
    tools, data, nowhere = str(Path(require("redis-server", find_binary())).parent), tmp_path / "data", tmp_path / "nowhere"
    data.mkdir()
    nowhere.mkdir(mode=0o555)
    redis_port, port = str(free_port()), str(free_port())
    redis_here = {"redis-cli": f"redis-cli -p {redis_port}"}
    store = RedisStore(f"redis://127.0.0.1:{redis_port}/0")
    engine = SimulatedEngine(episodes={**EPISODES, "slow": EPISODES["talk"], "long": EPISODES["talk"]}, seed=7, token_delay=0.01)
    services["redis"]["command"] += ["--port", redis_port, "--bind", "127.0.0.1"]

    def redis():
        return Container(services["redis"], folder=data, path=f"{tools}:{os.environ['PATH']}", elsewhere=redis_here, writes=True)

    async with engine.serve() as up, redis() as kept:
        await until(kept.well, "Redis passes its health check")
        here = {
            "redis:6379": f"127.0.0.1:{redis_port}",
            "http://engine:8000": up,
            reading.image_environment()["TOKENCACHE_PORT"]: port,
            "tokencache-health": str(reading.DEPLOY / "health.py"),
            "/opt/tokencache/bin": str(installed),
        }
        image = reading.image_list("ENTRYPOINT"), reading.image_environment()
        path = f"{installed}:/usr/local/bin:/usr/bin:/bin"
        made = Container(services["tokencache"], folder=nowhere, path=path, elsewhere=here, writes=False, image=image)
        async with made as proxy, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            await until(proxy.well, "the proxy passes its health check")
            await _calls(http)
            code, printed = await _stopped_in_mid_stream(proxy, http)
        assert code == 0, printed
        assert "calls in progress may finish" in printed
        assert "Traceback" not in printed
        assert list(nowhere.iterdir()) == []
        kept.process.kill()
        await kept.ended()

    async with redis() as again:
        await until(again.well, "Redis has loaded its log")
        await store.open()
        turns = {name: len(await store.turns(name)) for name in ("demo", "slow", "long")}
        await store.close()
    assert turns == {"demo": 2, "slow": 1, "long": 1}  # all replies are in Redis's log


async def _calls(http):
    """Two turns of one session, the second continuing the first; a long one, whose export runs in another process."""
    first = await _say(http, "demo", [user("list")])
    await _say(http, "demo", [user("list"), echo(first), *results(first)])
    async with http.get("/tokencache/v1/sessions/demo/trajectories") as refused:
        assert refused.status == 401
    (sequence,) = (await _exported(http, "demo"))["sequences"]
    assert [turn["match"] for turn in sequence["turns"]] == ["root", "continue"]
    await _say(http, "long", [user("naïve café " * (LARGE // 4))])
    (sequence,) = (await _exported(http, "long"))["sequences"]
    assert len(sequence["token_ids"]) > LARGE


async def _say(http, session, messages):
    async with http.post(CHAT, json={"model": "sim", "messages": messages}, headers={HEADER: session}) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["message"]


async def _exported(http, session):
    headers = {"Authorization": f"Bearer {reading.KEY}"}
    async with http.get(f"/tokencache/v1/sessions/{session}/trajectories", headers=headers) as answer:
        assert answer.status == 200
        return await answer.json()


async def _stopped_in_mid_stream(proxy, http):
    """Stops the proxy while it streams; the stream continues to its end."""
    body = {"model": "sim", "messages": [user("count")], "stream": True}
    async with http.post(CHAT, json=body, headers={HEADER: "slow"}) as answer:
        beginning = await answer.content.readuntil(b"\n\n")
        proxy.process.send_signal(signal.SIGTERM)
        events = [event for event in (beginning + await answer.read()).decode().split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] == "stop"
    return await proxy.ended()

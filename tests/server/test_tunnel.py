"""The recipe for a remote sandbox (docs/topologies/sidecar.md) with OpenSSH on loopback; the tunnel is cut in the middle of a call."""

import asyncio
import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.ports import free_port
from tests.proxy.kit import proxied
from tests.proxy.test_retries import gate, open_calls, wanted
from tests.support.material import needs
from tests.support.patient import patient  # noqa: F401 - a fixture
from tests.support.waiting import block_until, until
from tokencache.client import AsyncClient

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))
READY = SSHD and shutil.which("ssh") and (os.getuid() or Path("/run/sshd").is_dir())  # Debian's sshd refuses to run as root without it
pytestmark = needs("OpenSSH", READY)

HARNESS = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=20)
messages = [{"role": "user", "content": "EPISODE:talk"}]
for _ in range(2):
    reply = client.chat.completions.create(model="sim", messages=messages).choices[0].message
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "go on"}]
"""


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running(command):
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@contextmanager
def sandbox(folder):
    """An SSH server in place of the sandbox's. Yields the beginning of a command that reaches it."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, stdin=subprocess.DEVNULL)
    (folder / "authorized").write_bytes((folder / "user.pub").read_bytes())
    options = {
        "HostKey": folder / "host", "AuthorizedKeysFile": folder / "authorized", "PidFile": "none", "StrictModes": "no", "UsePAM": "no",
        "ListenAddress": "127.0.0.1",
    }  # fmt: skip
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    port = free_port()
    with running([SSHD, "-D", "-e", "-f", folder / "config", "-p", str(port)]) as server:
        block_until(lambda: listens(port) or server.poll() is not None, "the SSH server")
        assert server.poll() is None, server.stderr.read()
        known = ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder / 'known'}", "-o", "IdentitiesOnly=yes"]
        yield ["ssh", "-q", "-F", "none", "-i", folder / "user", "-p", str(port), *known, f"{getpass.getuser()}@127.0.0.1"]


@contextmanager
def tunnel(ssh, there, here):
    """The recipe's `ssh -R`. Leaving it cuts the connection."""
    block_until(lambda: not listens(there), "the end of an earlier tunnel")
    options = ["-N", "-o", "ExitOnForwardFailure=yes", "-R", f"127.0.0.1:{there}:127.0.0.1:{here}"]
    with running([*ssh[:-1], *options, ssh[-1]]) as client:
        block_until(lambda: listens(there) or client.poll() is not None, "the tunnel")
        assert client.poll() is None, client.stderr.read()
        yield


async def test_a_harness_in_a_sandbox_whose_tunnel_breaks_during_a_call(tmp_path):
    there = free_port()
    async with proxied(public_url=f"http://127.0.0.1:{there}", linger=600) as rig, AsyncClient(rig.url) as client:
        session, here, go = await client.create("r17"), int(rig.url.rpartition(":")[2]), gate(rig)
        with ExitStack() as opened:
            ssh = opened.enter_context(sandbox(tmp_path))
            with tunnel(ssh, there, here):
                command = shlex.join([sys.executable, "-c", HARNESS, session.base_url, session.key])
                harness = opened.enter_context(running([*ssh, command]))
                await until(lambda: open_calls(rig, "r17"), "its first call")
                harness_ended = asyncio.create_task(asyncio.to_thread(harness.wait))
            with tunnel(ssh, there, here):
                await wanted(rig, "r17")
                go.set()
                assert await harness_ended == 0, harness.stderr.read()
        trajectory = await session.fetch()
        assert (trajectory.complete, trajectory.figures.turns, len(rig.ground_truth("r17"))) == (True, 2, 2)

#!/usr/bin/env python3
"""Builds the wheels and source distributions of a release, and uses them as a new user does: `release.py FOLDER`.

The proxy's wheel is installed into an empty environment, and its packages are counted there: it brings what `serve` needs, and no more.
With the extra `testing` the demo runs there, then an engine and the proxy; a rollout is recorded, exported and verified.

Exit code 0: all of it worked. FOLDER then holds what can be uploaded.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
MOST_PACKAGES, MOST_MB = 40, 95
"""What a user installs with the proxy alone. Raise a limit only for a package that `serve` needs."""
SECONDS = 120
"""How long each step may take, on a busy machine too."""


def run(*command: object, **options: object) -> str:
    """Run a command; returns what it printed.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=SECONDS * 5, check=False, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> Path:
    """Build both distributions, each wheel from its source distribution; returns the proxy's wheel."""
    for project in (ROOT, ROOT / "vllm_plugin"):
        run(UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder, project)
    for file in sorted(folder.glob("tokencache*")):
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
    (wheel,) = folder.glob("tokencache-*.whl")
    return wheel


def install(python: Path, wheel: Path, extra: str = "") -> None:
    """Install the wheel with the locked versions of what it needs."""
    run(UV, "pip", "install", "--quiet", "--python", python, "--constraint", ROOT / "requirements.lock", f"{wheel}{extra}")


def weigh(venv: Path) -> None:
    """Print how much was installed.

    Raises:
        SystemExit: it is more than a user expects.
    """
    packages = json.loads(run(UV, "pip", "list", "--format", "json", "--python", venv / "bin/python"))
    megabytes = sum(file.stat().st_size for file in venv.rglob("*") if file.is_file() and not file.is_symlink()) / 1e6
    print(f"the proxy alone: {len(packages)} packages, {megabytes:.0f} MB")
    if len(packages) > MOST_PACKAGES or megabytes > MOST_MB:
        raise SystemExit(f"that is more than {MOST_PACKAGES} packages or {MOST_MB} MB: {[package['name'] for package in packages]}")


@contextlib.contextmanager
def serving(ready: str, *command: object, cwd: Path) -> Iterator[None]:
    """Run a server until it answers at a URL, and stop it afterwards."""
    log = cwd / f"{Path(str(command[0])).name}.log"
    with log.open("w") as written, subprocess.Popen([str(word) for word in command], cwd=cwd, stdout=written, stderr=written) as server:
        try:
            deadline = time.monotonic() + SECONDS
            while not answers(ready):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command} does not answer:\n{log.read_text()}")
                time.sleep(0.1)
            yield
        finally:
            server.terminate()


def answers(url: str) -> bool:
    """Whether a GET succeeds."""
    try:
        return httpx2.get(url, timeout=SECONDS).is_success
    except httpx2.TransportError:
        return False


def free_port() -> int:
    """Find a port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def record(proxy: str) -> None:
    """Play two turns of a rollout, as a harness does: each request carries all messages so far. Then finish it, as a trainer does."""
    with httpx2.Client(base_url=proxy, timeout=SECONDS) as client:
        messages: list[dict[str, str]] = []
        for question in ("What is in this folder?", "And now?"):
            messages.append({"role": "user", "content": question})
            answer = client.post("/s/rollout-1/v1/chat/completions", json={"model": "sim", "messages": messages}).raise_for_status()
            messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        client.post("/tokencache/v1/sessions/rollout-1/finish", json={"reward": 1.0}).raise_for_status()


def use(binaries: Path, folder: Path) -> None:
    """Run the demo; then serve, record, export and verify.

    Raises:
        SystemExit: something failed, or the two turns are not one sequence.
    """
    tokencache = binaries / "tokencache"
    run(tokencache, "demo", "--json", "demo.json", cwd=folder)
    engine, proxy = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    simulated = ("-m", "tokencache.testing.engine", "--model", "sim", "--port", engine.rpartition(":")[2])
    served = ("serve", "--upstream", engine, "--port", proxy.rpartition(":")[2], "--store", "file:store")
    with (
        serving(f"{engine}/health", binaries / "python", *simulated, cwd=folder),
        serving(f"{proxy}/readyz", tokencache, *served, cwd=folder),
    ):
        record(proxy)
        print(run(tokencache, "export", "rollout-1", "--to", "rollouts.jsonl", "--seal", "--proxy", proxy, cwd=folder).strip())
        print(run(tokencache, "verify", "rollouts.jsonl", cwd=folder).strip())
    rollout = json.loads((folder / "rollouts.jsonl").read_text())
    if [len(sequence["turns"]) for sequence in rollout["sequences"]] != [2]:
        raise SystemExit("two turns of one conversation are not one sequence")


def main(out: Path) -> None:
    """Build a release into a folder, and try it."""
    wheel = build(out)
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder, "venv")
        run(UV, "venv", "--quiet", "--python", sys.executable, venv)
        install(venv / "bin/python", wheel)
        weigh(venv)
        run(venv / "bin/tokencache", "serve", "--help", cwd=folder)
        install(venv / "bin/python", wheel, "[testing]")
        use(venv / "bin", Path(folder))
    print(f"{wheel.name} installs and works; to publish it: uv publish {out}/*")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the wheels and source distributions")
    main(parser.parse_args().folder.resolve())

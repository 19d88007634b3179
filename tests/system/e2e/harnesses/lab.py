"""One run of one harness: the program in its namespace, the tap outside, and what the engine wrote down meanwhile.

`$TOKENCACHE_E2E_RECORDS` names a folder that keeps, of each run through the proxy, all that is known of it: `calls.jsonl`
(the tap's), `export.json` (trajectories and turns, as the proxy tells them) and `books.jsonl` (the engine's).
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import namespace
import structures
import tasks
from conftest import proxying
from rig.engine_books import read_books
from rig.exported import trajectory, turns
from rig.model import make_model
from rig.server import MODEL, VllmServer
from tap import Tap, read_calls

from tokencache.adapters import files
from tokencache.adapters.launch import prepare
from tokencache.store.memory import MemoryStore
from tokencache.testing.tokenizer import build_tokenizer

CONTEXT = 131072
"""Real system prompts take up a good part of what the other tests' server has."""
SESSION = "lab"

CONFIGURATION = namespace.HOME / "configuration"

BARRIER = [3, 1, 4, 1, 5]
"""A prompt of ours: when it is answered, the engine has written down every request that ended before."""


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    ended: list
    """One per process: exit status and output."""
    calls: list
    """What went over the wire, as the tap wrote it down."""
    generations: list
    """What the engine wrote down: (prompt ids, sampled ids) in the order of the calls."""
    folder: Path

    @property
    def work(self):
        return self.folder / "work"

    @property
    def output(self):
        return "\n".join(ended.output for ended in self.ended)


PATIENCE = 300
"""Seconds that one process of a harness may take: the longest takes 35 on two idle cores."""


def lab_engine(servers, tmp_path_factory):
    """A real vLLM that keeps books and knows all episodes of the lab; the same one for all who ask in turn."""

    def make():
        folder = tmp_path_factory.mktemp("lab")
        build_tokenizer().save(folder / "tokenizer")
        model = make_model(folder / "tokenizer", folder / "model")
        episodes = tasks.scripts() | structures.scripts()
        return VllmServer(model, episodes, max_model_len=CONTEXT, workdir=folder, books=folder / "books.jsonl")

    return servers.keep("lab", make)


@dataclass(frozen=True)
class Through:
    """A run through the proxy, and what the proxy tells of it."""

    run: Run
    exported: dict
    turns: list

    @property
    def forgiven(self):
        return tuple(sorted({rule for turn in self.turns for rule in turn["forgiven"]}))

    @property
    def sequences(self):
        return [(one["start"], one["reason"], len(one["turns"])) for one in self.exported["sequences"]]


async def run_through_proxy(name, program, steps, server, folder):
    """Let `program` do these steps in a session of a proxy of its own."""
    async with proxying(server.url, MemoryStore()) as proxied:
        run = await run_harness(program, steps, server, folder, proxied.url)
        through = Through(run, await trajectory(proxied, SESSION), await turns(proxied, SESSION))
    if records := os.environ.get("TOKENCACHE_E2E_RECORDS"):
        keep(through, Path(records) / name)
    return through


def keep(through, folder):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(through.run.folder / "calls.jsonl", folder)
    told = {"trajectories": through.exported, "turns": through.turns}
    (folder / "export.json").write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
    books = [json.dumps({"prompt": prompt, "sampled": sampled}) + "\n" for prompt, sampled in through.run.generations]
    (folder / "books.jsonl").write_text("".join(books), encoding="utf-8")


async def run_harness(program, steps, server, folder, proxy=None, *, session=SESSION, seconds=PATIENCE):
    """Let `program` do these steps through `proxy`, or straight at the engine; it is configured in the same way for both."""
    namespace.prepare(folder)
    at_port = namespace.port()
    launch = prepare(program.adapter, f"http://127.0.0.1:{at_port}", session, None, MODEL, CONFIGURATION, context=server.max_model_len)
    outside = folder / CONFIGURATION.relative_to(namespace.ROOM)
    files.write(outside, {outside / path.relative_to(CONFIGURATION): text for path, text in launch.files.items()})
    environment = launch.environment(program.environment | {"PATH": program.search_path})
    before = len(await read_generations(server))
    way_out, record = folder / "way-out", folder / "calls.jsonl"
    ended = []
    # without a proxy nobody takes the session off the path
    async with Tap(proxy or server.url, way_out, record, strip="" if proxy else f"/s/{session}/h/{program.adapter.name}"):
        for step in steps:
            name, *rest = (*launch.argv, *step.words)
            command = [shutil.which(name, path=program.search_path), *rest]
            limits = {"seconds": seconds, "interrupt": step.interrupt}
            ended.append(await namespace.run_isolated(command, folder, environment, way_out, at_port, **limits))
            if ended[-1].returncode and not step.interrupt:
                break
    return Run(ended, read_calls(record), (await read_generations(server))[before:], folder)


async def read_generations(server):
    """Every request that the engine has finished so far, as `(prompt ids, sampled ids)`."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": BARRIER, "max_tokens": 1}) as answer,
    ):
        assert answer.status == 200, await answer.text()
    return [(prompt, sampled) for prompt, sampled in read_books(server.books) if prompt != BARRIER]

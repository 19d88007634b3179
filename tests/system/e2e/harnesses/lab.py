"""One run of one harness: the program in its namespace, the recording relay outside, and the engine's own log of the run.

`$TOKENCACHE_E2E_RECORDS` names a folder that keeps everything about each run through the proxy: `calls.jsonl` (the relay's), `export.json`
(trajectories and turns, as the proxy exports them) and `ground_truth.jsonl` (the engine's log).
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import namespace
import pictures
import structures
import tasks
from conftest import proxying
from recording_relay import RecordingRelay, read_calls
from rig.exported import trajectory, turns
from rig.ground_truth import read_ground_truth
from rig.model import make_model
from rig.server import LIMIT_S, MODEL, VllmServer
from rig.vision import VisionServer, make_vision_model

from tokencache.adapters import files
from tokencache.adapters.launch import prepare
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine
from tokencache.testing.tokenizer import build_tokenizer

CONTEXT = 131072
"""Real system prompts take up a large part of the context of the other tests' server."""
SESSION = "lab"

CONFIGURATION = namespace.HOME / "configuration"

BARRIER = [3, 1, 4, 1, 5]
"""A prompt of our own: when it is answered, the engine has logged every request that ended before."""


@dataclass(frozen=True)
class Run:
    """The results of a run."""

    ended: list
    """One per process: exit status and output."""
    calls: list
    """The HTTP traffic, as the relay recorded it."""
    generations: list
    """The engine's log: (prompt ids, sampled ids) in the order of the calls."""
    folder: Path

    @property
    def work(self):
        return self.folder / "work"

    @property
    def output(self):
        return "\n".join(ended.output for ended in self.ended)


def lab_engine(servers, tmp_path_factory):
    """A real vLLM that logs its requests and has all episodes of the harness tests; consecutive users share it."""

    def make():
        folder = tmp_path_factory.mktemp("lab")
        build_tokenizer().save(folder / "tokenizer")
        model = make_model(folder / "tokenizer", folder / "model")
        episodes = tasks.scripts() | structures.scripts()
        return VllmServer(model, episodes, max_model_len=CONTEXT, workdir=folder, ground_truth=folder / "ground_truth.jsonl")

    return servers.keep("lab", make)


def seeing_engine(servers, tmp_path_factory):
    """A real vLLM of a model that sees images, with the plugin and the episodes of `pictures`."""

    def make():
        folder = tmp_path_factory.mktemp("pictures")
        build_tokenizer().save(folder / "tokenizer")
        model = make_vision_model(folder / "tokenizer", folder / "model")
        more = {"workdir": folder, "ground_truth": folder / "ground_truth.jsonl"}
        return VisionServer(model, pictures.scripts(), max_model_len=CONTEXT, images=pictures.MOST, **more)

    return servers.keep("pictures", make)


@dataclass(frozen=True)
class SimulatedServer:
    """The project's simulated engine as a model that sees images, for a harness whose turns the scripted model cannot count."""

    engine: SimulatedEngine
    url: str
    description = "this project's simulated engine"

    @property
    def max_model_len(self):
        return self.engine.max_model_len


@dataclass(frozen=True)
class Through:
    """A run through the proxy, and the proxy's export of it."""

    run: Run
    exported: dict
    turns: list
    about: dict
    """The program's version, and the engine."""

    @property
    def forgiven(self):
        return tuple(sorted({rule for turn in self.turns for rule in turn["forgiven"]}))

    @property
    def sequences(self):
        return [(one["start"], one["reason"], len(one["turns"])) for one in self.exported["sequences"]]


async def run_through_proxy(name, program, steps, server, folder, *, given=()):
    """Runs these steps of `program` in a session of a separate proxy; `given` are files for the work directory, as `(name, content)`."""
    async with proxying(server.url, MemoryStore()) as proxied:
        run = await run_harness(program, steps, server, folder, proxied.url, given=given)
        about = {"version": program.version, "engine": server.description}
        through = Through(run, await trajectory(proxied, SESSION), await turns(proxied, SESSION), about)
    if records := os.environ.get("TOKENCACHE_E2E_RECORDS"):
        keep(through, Path(records) / name)
    return through


def keep(through, folder):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(through.run.folder / "calls.jsonl", folder)
    export = {"about": through.about, "trajectories": through.exported, "turns": through.turns}
    (folder / "export.json").write_text(json.dumps(export, ensure_ascii=False), encoding="utf-8")
    ground_truth = [json.dumps({"prompt": prompt, "sampled": sampled}) + "\n" for prompt, sampled in through.run.generations]
    (folder / "ground_truth.jsonl").write_text("".join(ground_truth), encoding="utf-8")


async def run_harness(program, steps, server, folder, proxy=None, *, session=SESSION, seconds=LIMIT_S, given=()):
    """Runs these steps of `program` through `proxy`, or directly against the engine; its configuration is the same for both."""
    namespace.prepare(folder)
    for name, content in given:
        (folder / namespace.WORK.name / name).write_bytes(content)
    at_port = namespace.port()
    launch = prepare(program.adapter, f"http://127.0.0.1:{at_port}", session, None, MODEL, CONFIGURATION, context=server.max_model_len)
    outside = folder / CONFIGURATION.relative_to(namespace.RUN_DIR)
    files.write(outside, {outside / path.relative_to(CONFIGURATION): text for path, text in launch.files.items()})
    environment = launch.environment(program.environment | {"PATH": program.search_path})
    before = len(await read_generations(server))
    way_out, record = folder / "way-out", folder / "calls.jsonl"
    ended = []
    # without a proxy nothing removes the session from the path
    async with RecordingRelay(proxy or server.url, way_out, record, strip="" if proxy else f"/s/{session}/h/{program.adapter.name}"):
        for step in steps:
            name, *rest = (*launch.argv, *(word.replace("{port}", str(at_port)) for word in step.words))
            command = [shutil.which(name, path=program.search_path), *rest]
            limits = {"seconds": seconds, "interrupt": step.interrupt}
            ended.append(await namespace.run_isolated(command, folder, environment, way_out, at_port, **limits))
            if ended[-1].returncode and not step.interrupt:
                break
    return Run(ended, read_calls(record), (await read_generations(server))[before:], folder)


async def read_generations(server):
    """Every request that the engine has finished so far, as `(prompt ids, sampled ids)`."""
    if isinstance(server, SimulatedServer):
        return [(entry.prompt_ids, entry.completion_ids) for entry in server.engine.ground_truth]
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/v1/completions", json={"model": server.name, "prompt": BARRIER, "max_tokens": 1}) as answer,
    ):
        assert answer.status == 200, await answer.text()
    return [(prompt, sampled) for prompt, sampled in read_ground_truth(server.ground_truth) if prompt != BARRIER]

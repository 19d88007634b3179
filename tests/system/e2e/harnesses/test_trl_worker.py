"""TRL's own rollout worker runs real harness programs, on a real vLLM: what its trainer gets is what the proxy exports."""

import json
import os

import namespace
import pytest
import tasks
from conftest import proxying, trl_venv
from lab import lab_engine, read_generations
from programs import PROGRAMS
from recording_relay import RecordingRelay
from rig.exported import generations, trajectory
from rig.server import LIMIT_S, REPOSITORY

from tokencache.client import AsyncClient
from tokencache.store.memory import MemoryStore


@pytest.fixture(scope="module")
def engine(servers, tmp_path_factory):
    return lab_engine(servers, tmp_path_factory)


async def play(engine, proxied, programs, folder):
    """Let TRL's worker play each program's short job; returns the rows. All of it runs where only the proxy can be reached."""
    namespace.prepare(folder)
    way_out, port = folder / "way-out", namespace.port()
    wanted = {
        "proxy": f"http://127.0.0.1:{port}",
        "seconds": LIMIT_S,
        "rows": str(namespace.WORK / "rows"),
        "tasks": [
            {"harness": program.name, "arguments": program.first(f"EPISODE:{program.name}-short Make the file done.txt.")}
            for program in programs
        ],
    }
    environment = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    environment |= {"PATH": os.pathsep.join(program.search_path for program in programs)}
    for program in programs:
        environment |= program.environment
    command = [trl_venv() / "bin/python", REPOSITORY / "tests/system/e2e/rig/trl_worker.py", json.dumps(wanted)]
    async with RecordingRelay(proxied.url, way_out, folder / "calls.jsonl"):
        ended = await namespace.run_isolated(command, folder, environment, way_out, port, seconds=2 * LIMIT_S)
    assert ended.returncode == 0, ended.output
    return [json.loads(line) for line in (folder / "work" / "rows").read_text().splitlines()]


async def test_the_trainer_gets_the_export_of_harnesses_in_any_dialect(engine, tmp_path, record_property):
    programs = [PROGRAMS[name] for name in tasks.SHORT if PROGRAMS[name].installed]
    if not (trl_venv() / "bin/python").exists() or not programs:
        pytest.skip(f"no TRL in {trl_venv()}, or none of {', '.join(tasks.SHORT)}: run make e2e-install")
    (trl,) = trl_venv().glob("lib/python*/site-packages/trl-*.dist-info")
    record_property("trainer", " ".join(trl.stem.split("-")))
    async with proxying(engine.url, MemoryStore()) as proxied:
        rows = await play(engine, proxied, programs, tmp_path)
        logged = {(tuple(prompt), tuple(sampled)) for prompt, sampled in await read_generations(engine)}
        async with AsyncClient(proxied.url) as client:
            states = {state.group: state for state in await client.sessions(outcome="ok")}
        for number, program in enumerate(programs):
            group = f"r-{number}"
            assert states[group].valid, program.name
            exported = await trajectory(proxied, states[group].session)
            assert exported["reward"] == 1.0
            assert {turn["dialect"] for one in exported["sequences"] for turn in one["turns"]} == {program.dialect}
            assert max(len(one["turns"]) for one in exported["sequences"]) == len(tasks.short_job(tasks.KITS[program.name]))
            assert {(prompt, sampled) for prompt, sampled, _ in generations(exported)} <= logged
            found = sorted((row["ids"], row["mask"]) for row in rows if row["group"] == group)
            assert found == sorted((one["token_ids"], one["loss_mask"]) for one in exported["sequences"])
            logprobs = {tuple(one["token_ids"]): one["logprobs"] for one in exported["sequences"]}
            for row in (row for row in rows if row["group"] == group):
                assert row["logprobs"] == pytest.approx(logprobs[tuple(row["ids"])], abs=1e-6)
                assert row["reward"] == 1.0

"""The commands, against a proxy before the simulated engine: what is printed, what is written, and the exit code."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.proxy.kit import TOOLS, echo, proxied, results, until, user
from tokencache.cli import app
from tokencache.trajectories.formats.registry import FORMATS


class Shell:
    """Runs commands in a thread; the proxy lives in the test's loop."""

    def __init__(self, rig, key=None):
        self.rig = rig
        self.options = ["--proxy", rig.url, *(["--admin-key", key] if key else [])]

    async def __call__(self, *args, code=0, far=True):
        told = await asyncio.to_thread(CliRunner().invoke, app, [*args, *(self.options if far else [])])
        assert told.exit_code == code, (told.stdout, told.stderr, told.exception)
        return told


@pytest.fixture
async def shell():
    async with proxied() as rig:
        yield Shell(rig)


async def played(rig, session, calls=3):
    """A session of one line, and a retry of its second call."""
    messages = [user("hi")]
    for _ in range(calls):
        said = await rig.say(session, messages, tools=TOOLS)
        messages += [echo(said), *results(said)]
    await rig.say(session, messages[:3], tools=TOOLS)


async def test_sessions_are_listed_filtered_and_counted(shell):
    for name in ("run7-a", "run7-b", "other"):
        await played(shell.rig, name, 1)
    await shell.rig.http.post(f"{shell.rig.url}/tokencache/v1/sessions/other/seal")
    told = (await shell("sessions")).stdout
    rows = [line.split() for line in told.splitlines()]
    assert rows[0] == ["session", "turns", "open", "incidents", "complete", "sealed", "age"]
    assert [row[0] for row in rows[1:4]] == ["other", "run7-b", "run7-a"], "newest first"
    assert rows[1][1:6] == ["2", "0", "0", "yes", "yes"]
    assert rows[2][5] == "no"
    assert rows[4] == ["3", "sessions"]
    assert "\x1b" not in told
    assert "2 sessions" in (await shell("sessions", "run7-")).stdout
    assert [one["session"] for one in msgspec.json.decode((await shell("sessions", "--pattern", "*-a", "--json")).stdout)] == ["run7-a"]
    assert (await shell("sessions", "nothing")).stdout == "0 sessions\n"


async def test_show(shell):
    await played(shell.rig, "demo")
    told = (await shell("show", "demo")).stdout
    assert "session demo  complete  not sealed" in told
    assert "● root" in told
    assert "● branch" in told
    assert "there is no session 'nope'" in (await shell("show", "nope", code=1)).stderr


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
async def test_export_and_verify(shell, tmp_path, ending):
    for name in ("a", "b"):
        await played(shell.rig, name)
    path = str(tmp_path / f"all{ending}")
    told = await shell("export", "--all", "--to", path)
    assert told.stdout == ""
    assert f"2 sessions in {path}: 4 rows, " in told.stderr
    checked = (await shell("verify", path, far=False)).stdout
    assert f"{path}: 2 rollouts, 8 turns, " in checked
    assert "all holds" in checked
    assert "no export can show it" in checked


def _swap_first_two(logprobs):
    """Swap the first two log probabilities that differ."""
    sampled = [i for i, value in enumerate(logprobs) if value != 0.0]
    a, b = next((i, j) for i, j in itertools.pairwise(sampled) if logprobs[i] != logprobs[j])
    logprobs[a], logprobs[b] = logprobs[b], logprobs[a]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
async def test_log_probabilities_that_changed_places_in_a_file_are_found(shell, tmp_path, ending):
    await played(shell.rig, "a")
    path = tmp_path / f"a{ending}"
    await shell("export", "a", "--to", str(path))
    if ending == ".jsonl":
        told = msgspec.json.decode(path.read_bytes())
        _swap_first_two(told["sequences"][0]["logprobs"])
        path.write_bytes(msgspec.json.encode(told) + b"\n")
    else:
        table = pq.read_table(path)
        rows = table.to_pylist()
        _swap_first_two(rows[0]["logprobs"])
        pq.write_table(table.from_pylist(rows, schema=table.schema), path)
    checked = (await shell("verify", str(path), far=False, code=1)).stdout
    assert "1 BREAK" in checked
    assert "the log probabilities of tokens" in checked


async def test_export_to_standard_output_is_what_the_proxy_says(shell):
    await played(shell.rig, "a")
    told = await shell("export", "a", "--to", "-")
    async with shell.rig.http.get(f"{shell.rig.url}/tokencache/v1/sessions/a/trajectories?drift=off") as answer:
        assert told.stdout == await answer.text() + "\n"


async def test_export_of_another_format(shell, tmp_path):
    await played(shell.rig, "a")
    await shell("export", "a", "--format", "trl", "--to", str(tmp_path / "a.parquet"))
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    answer = await shell.rig.get("/tokencache/v1/sessions/a/trajectories?format=trl")
    assert [row["prompt_ids"] for row in rows] == [row["prompt_ids"] for row in answer["rows"]]
    told = await shell("export", "a", "--format", "nope", "--to", str(tmp_path / "b.jsonl"), code=1)
    assert f"'nope' is not one of: {', '.join(FORMATS)}" in told.stderr


async def test_deleted_once_the_file_is_there(shell, tmp_path):
    for name in ("run-a", "run-b", "other"):
        await played(shell.rig, name, 1)
    path = tmp_path / "a.jsonl"
    told = await shell("export", "--pattern", "run-*", "--to", str(path), "--delete")
    assert "2 deleted from the proxy: run-a, run-b" in told.stderr
    assert [msgspec.json.decode(line)["sealed"] for line in path.read_bytes().splitlines()] == [True, True]
    assert "1 session\n" in (await shell("sessions")).stdout


async def test_incomplete_sessions_are_told_loudly(shell, tmp_path):
    await played(shell.rig, "a", 1)
    await shell.rig.store.begin("a", "a call that never ends", [])
    told = await shell("export", "a", "--to", str(tmp_path / "a.jsonl"), "--delete")
    assert "1 INCOMPLETE, something that the model said is missing" in told.stderr
    assert "1 not deleted: a call is still open in them: a" in told.stderr
    assert "1 session, 1 incomplete" in (await shell("sessions")).stdout
    assert "incomplete: a (call-open)" in (await shell("verify", str(tmp_path / "a.jsonl"), far=False)).stdout
    told = await shell("export", "a", "--to", str(tmp_path / "b.jsonl"), "--complete-only")
    assert "1 incomplete and left out: a" in told.stderr


async def test_verify_names_the_first_break(shell, tmp_path):
    await played(shell.rig, "a")
    path = tmp_path / "a.jsonl"
    await shell("export", "a", "--to", str(path))
    good = msgspec.json.decode(path.read_bytes())
    sequence = good["sequences"][0]
    start, _ = sequence["turns"][1]["completion"]
    before = sequence["token_ids"][start - 10 : start]
    sequence["token_ids"][start] += 1
    (tmp_path / "bad.json").write_bytes(msgspec.json.encode(good))
    told = (await shell("verify", str(path), str(tmp_path / "bad.json"), far=False, code=1)).stdout
    assert "bad.json: 1 rollout, 4 turns, " in told
    assert f"session a, sequence {sequence['id']}, turn {sequence['turns'][1]['turn']}, token {start}: " in told
    assert f"… {' '.join(map(str, before))} [{sequence['token_ids'][start]} " in told
    found = msgspec.json.decode((await shell("verify", "--json", str(tmp_path / "bad.json"), far=False, code=1)).stdout)
    assert found[0]["breaks"][0]["check"] == "hashes"
    assert found[0]["breaks"][0]["token"] == start


async def test_verify_of_a_session_and_of_files_that_are_none(shell, tmp_path):
    await played(shell.rig, "a")
    assert "a: 1 rollout, 4 turns, " in (await shell("verify", "a")).stdout
    assert "there is no session 'nope'" in (await shell("verify", "nope", code=1)).stderr
    assert "cannot be read" in (await shell("verify", str(tmp_path / "no.jsonl"), far=False, code=1)).stderr
    twice = tmp_path / "twice.jsonl"
    await shell("export", "a", "--to", str(twice))
    twice.write_bytes(twice.read_bytes() * 2)
    assert "session a: is there twice: number 1 and number 2" in (await shell("verify", str(twice), far=False, code=1)).stdout
    (tmp_path / "other.jsonl").write_text('{"session": "x", "rows": []}\n')
    assert "number 1 is no native rollout" in (await shell("verify", str(tmp_path / "other.jsonl"), far=False, code=1)).stdout
    (tmp_path / "nasty.jsonl").write_text('{"session": "\\u001b]0;owned\\u0007"}\n')
    assert "\x1b" not in (await shell("verify", str(tmp_path / "nasty.jsonl"), far=False, code=1)).stdout
    (tmp_path / "empty.jsonl").write_text("")
    assert "there is no rollout in it" in (await shell("verify", str(tmp_path / "empty.jsonl"), far=False, code=1)).stdout


@pytest.mark.parametrize(
    "case",
    [
        (["export", "--to", "a.jsonl"], 2, "name sessions, or say --all"),
        (["export", "a", "--all", "--to", "a.jsonl"], 2, "name sessions, or say --all"),
        (["export", "--all", "--to", "-", "--delete"], 2, "--delete wants a file"),
        (["export", "--all"], 2, "--to"),
        (["export", "--all", "--to", "a.jsonl"], 1, "there is no session yet"),
        (["export", "--pattern", "x*", "--to", "a.jsonl"], 1, "there is no session that matches x*"),
        (["export", "a", "--to", "a.csv"], 1, "must end with .jsonl"),
        (["export", "a", "--to", "a.jsonl"], 1, "there is no session 'a'"),
    ],
)
async def test_what_cannot_be_done_is_told_and_nothing_is_written(shell, tmp_path, monkeypatch, case):
    args, code, words = case
    monkeypatch.chdir(tmp_path)
    told = await shell(*args, code=code)
    assert words in " ".join(told.stderr.replace("│", " ").split())
    assert not (tmp_path / "a.jsonl").exists()


async def test_the_admin_key_is_asked_for():
    async with proxied(admin_key="secret") as rig:
        assert "401" in (await Shell(rig)("sessions", code=1)).stderr
        assert (await Shell(rig, "secret")("sessions")).stdout == "0 sessions\n"


async def test_an_export_that_is_interrupted_says_what_was_written(shell, tmp_path):
    """Ctrl-C while the proxy is slow: the second session's answer does not come. The fifth is begun once the first is written."""
    for name in "abcde":
        await played(shell.rig, name, 1)
    held = asyncio.Event()
    turns = shell.rig.store.turns

    async def slow(session):
        if session == "b":
            await held.wait()
        return await turns(session)

    shell.rig.store.turns = slow
    path = tmp_path / "a.jsonl"
    command = [str(Path(sys.executable).parent / "tokencache"), "export", "--all", "--to", str(path), "--delete", *shell.options]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    with contextlib.ExitStack() as stack:
        stack.callback(held.set)

        async def first_is_written():
            return (await shell.rig.info("e"))["sealed"]

        await until(first_is_written, 30)
        os.kill(process.pid, signal.SIGINT)
        _, told = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 130
    assert f"stopped: {path}.part holds 1 of 5 sessions; nothing was deleted" in told.decode()
    assert not path.exists()
    assert (await shell.rig.info("a"))["turns"] == 2

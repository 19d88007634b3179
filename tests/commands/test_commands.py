"""The commands against a proxy with the simulated engine: output, files and exit codes."""

import asyncio
import contextlib
import itertools
import json
import re
import signal
import sys
from functools import partial
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.proxy.kit import TOOLS, echo, proxied, results, user
from tests.support.pairwise import some
from tests.support.waiting import PATIENCE, until
from tokencache.cli import app
from tokencache.trajectories.formats.registry import FORMATS


class Shell:
    """Runs commands in a thread. The proxy runs in the event loop of the test."""

    def __init__(self, rig, key=None):
        self.rig = rig
        self.options = ["--proxy", rig.url, *(["--admin-key", key] if key else [])]

    async def __call__(self, *args, code=0, far=True):
        result = await asyncio.to_thread(CliRunner().invoke, app, [*args, *(self.options if far else [])])
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result


@pytest.fixture
async def shell():
    async with proxied() as rig:
        yield Shell(rig)


async def record(rig, session, calls=3):
    """Record a session of one sequence, and a retry of its second call."""
    messages = [user("hi")]
    for _ in range(calls):
        said = await rig.say(session, messages, tools=TOOLS)
        messages += [echo(said), *results(said)]
    await rig.say(session, messages[:3], tools=TOOLS)


async def test_the_queue_is_shown_by_group(shell):
    for name in ("a1", "a2", "a3"):
        await shell("create", name, "--group", "a")
    assert (await shell("queue")).stdout == "0 finished sessions, 0 ready, 0 taken\n"
    await shell("finish", "a1", "a2")
    shown = (await shell("queue")).stdout
    assert re.fullmatch(r"2 finished sessions \(2 not valid\), 2 ready, 0 taken\ngroup a: 2 ready, waits for a3 since \d+ s\n", shown)
    assert json.loads((await shell("queue", "--json")).stdout)["groups"][0]["waits_for"] == ["a3"]
    async with shell.rig.http.post(f"{shell.rig.url}/tokencache/v1/queue/take", json={"consumer": "c"}) as answer:
        assert answer.status == 200
    assert "c has 1 session\ngroup a: 1 of 1 ready\n" in (await shell("queue")).stdout


async def test_sessions_are_listed_filtered_and_counted(shell):
    for name in ("run7-a", "run7-b", "other"):
        await record(shell.rig, name, 1)
    await shell("finish", "other")
    await shell("seal", "other")
    await shell("reward", "other", "0.25")
    result = (await shell("sessions")).stdout
    rows = [line.split() for line in result.splitlines()]
    assert rows[0] == ["session", "state", "turns", "tokens", "calls", "incidents", "complete", "reward", "age"]
    assert [row[0] for row in rows[1:4]] == ["other", "run7-b", "run7-a"], "newest first"
    assert (rows[1][1:3], rows[1][4:8]) == (["sealed", "2"], ["0", "0", "yes", "0.25"])
    assert (rows[2][1], rows[2][7]) == ("open", "-")
    assert rows[4] == ["3", "sessions"]
    assert "\x1b" not in result
    assert "2 sessions" in (await shell("sessions", "run7-")).stdout
    assert [one["session"] for one in msgspec.json.decode((await shell("sessions", "--pattern", "*-a", "--json")).stdout)] == ["run7-a"]
    assert (await shell("sessions", "nothing")).stdout == "0 sessions\n"
    assert (await shell("sessions", "--limit", "2")).stdout.splitlines()[-1] == "2 sessions of 3"
    assert "1 session\n" in (await shell("sessions", "--state", "sealed")).stdout
    await shell("label", "run7-a", "--group", "g", "--tag", "t")
    for option in (("--group", "g"), ("--tag", "t")):
        assert [one["session"] for one in msgspec.json.decode((await shell("sessions", *option, "--json")).stdout)] == ["run7-a"]
    assert "open, finished, sealed" in (await shell("sessions", "--state", "closed", code=1)).stderr


@pytest.mark.parametrize(
    "command",
    [("sessions",), ("show", "a"), ("verify", "a"), ("export", "a", "--to", "-"), ("export", "--all", "--to", "-"), ("drift", "a")],
)
async def test_a_wrong_proxy_is_named(shell, command):
    for url, words in (
        (shell.rig.up, f"{shell.rig.up} is not a tokencache proxy: it answered 404"),
        (f"{shell.rig.url}/s/a/v1", f"'{shell.rig.url}/s/a/v1' is not the base URL of a tokencache proxy"),
        ("localhost:8100", "Use 'http://localhost:8100'."),
    ):
        result = await shell(*command, "--proxy", url, code=1, far=False)
        assert words in result.stderr
        assert not result.stdout


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("show", "nope"), "there is no session 'nope'"),
        (("finish", "nope", "--json"), "there is no session 'nope'"),
        (
            ("seal", "open"),
            "session open is not finished: finish it first (`tokencache finish open`), or seal it by force (`",
        ),
        (("seal", "busy"), "session busy has calls in flight: wait until they end, or seal it by force (`tokencache seal busy --force`"),
        (("finish", "open", "--detail", "x"), "`detail` says what failed: it needs `failed`"),
        (("reward", "open", "--reward-file", "{file}"), "session open has no turn 'nope'; `tokencache show open`"),
        (("weights", "set", "7", "--engine", "http://e"), "engines: there is no engine http://e; `tokencache weights show` lists them"),
        (("report", "nope"), "no session is in run 'nope'"),
        (("sessions", "--proxy", "http://127.0.0.1:1"), "no answer, tried 4 times"),
    ],
)
async def test_errors_name_commands_and_no_routes(shell, tmp_path, monkeypatch, command, words):
    monkeypatch.setattr("tokencache.client.protocol._FIRST_PAUSE", 0.0)
    (tmp_path / "reward").write_text('{"turns": {"nope": 1}}')
    await shell("create", "open")
    await shell("create", "busy")
    await shell.rig.store.begin("busy", "k", [], replica="r")
    await shell("finish", "busy")
    result = await shell(*(one.format(file=tmp_path / "reward") for one in command), code=1, far="--proxy" not in command)
    assert f"tokencache: {words}" in result.stderr
    assert "/v1/sessions" not in result.output


async def test_show(shell):
    await record(shell.rig, "demo")
    result = (await shell("show", "demo")).stdout
    assert "session demo  complete  not sealed" in result
    assert "● root" in result
    assert "● branch" in result
    assert "there is no session 'nope'" in (await shell("show", "nope", code=1)).stderr


async def test_show_as_json_has_no_tokens(shell):
    await record(shell.rig, "demo")
    shown = msgspec.json.decode((await shell("show", "demo", "--json")).stdout)
    assert (shown["session"], shown["figures"]["turns"]) == ("demo", 4)
    assert [sequence["start"] for sequence in shown["sequences"]] == ["root", "branch"]
    assert not {"token_ids", "loss_mask", "logprobs"} & shown["sequences"][0].keys()
    assert "served" not in shown["sequences"][0]["turns"][0]


async def test_json_cannot_control_the_terminal(shell):
    """JSON escapes only the control characters of ASCII; a terminal obeys others, too, and reorders what it shows."""
    words = "\x1b[31m \x9b31m \u202eabc \u2066 \u200b"
    async with shell.rig.http.post(f"{shell.rig.url}/tokencache/v1/sessions", json={"session": "s", "metadata": {words: words}}) as answer:
        assert answer.status == 201
    await shell("finish", "s", "--failed", "odd", "--detail", words)
    for command in ("sessions",), ("show", "s"):
        printed = (await shell(*command, "--json")).stdout
        assert printed.replace("\n", "").isprintable()
        [found] = msgspec.json.decode(printed) if command == ("sessions",) else [msgspec.json.decode(printed)]
        assert found["outcome_detail"] == words


async def test_show_and_drift_agree_on_the_drift_of_a_session(shell):
    await record(shell.rig, "demo")
    whole = msgspec.json.decode((await shell("drift", "demo", "--json")).stdout)["total"]
    assert whole["drifted"]
    words = f"drift avoided: {whole['drifted_tokens']:,} tokens, in {whole['drifted']} of {whole['measured']} turns measured\n"
    assert words in (await shell("show", "demo", "--drift")).stdout
    assert "drift" not in (await shell("show", "demo")).stdout, "not measured unless asked"


async def test_drift_of_sessions_and_files_together(shell, tmp_path):
    path = str(tmp_path / "a.jsonl")
    for name in ("a", "b"):
        await record(shell.rig, name)
    await shell("export", "a", "--drift", "turns", "--to", path)
    assert msgspec.json.decode((await shell("drift", path, "b", "--json")).stdout)["total"]["sessions"] == 2
    assert "there is no session 'nope'" in (await shell("drift", "nope", code=1)).stderr


async def test_a_run_is_reported(shell):
    rewards = {"a": ("--reward", "1"), "b": ("--reward", "0.25"), "c": ("--failed", "sandbox"), "d": None}
    for name, finish in rewards.items():
        await shell("create", name, "--tag", "run:r7", "--group", "r7-g")
        await shell.rig.say(name, [user("EPISODE:talk")])
        if finish:
            await shell("finish", name, *finish)
    shown = (await shell("report", "r7")).stdout
    assert shown.startswith("run r7: 4 rollouts, 2 valid, 1 failed (sandbox 1), 1 running\npass rate 50.0% (1 with 1 or more)\n")
    assert re.search(r"^reward +0\.625 +0\.375 +0\.25 ", shown, re.MULTILINE)
    assert "which have no advantage: 0 of 1\n" in shown
    assert re.search(
        r"^group r7-g: 3 of 4 over, pass rate 50%, reward 0\.625, 1 failed; 3 ready, waits for d since \d+ s$", shown, re.MULTILINE
    )
    report = json.loads((await shell("report", "r7", "--json", "--passing", "0.25", "--with-failed")).stdout)
    assert (report["pass_rate"], report["with_failed"], report["values"]["tokens"]["count"]) == (1.0, True, 3)
    assert "4 rollouts, 2 valid" in (await shell("report", "--tag", "run:r7")).stdout
    assert "no session is in run 'r8'" in (await shell("report", "r8", code=1)).stderr
    assert "c" in (await shell("sessions", "--outcome", "sandbox")).stdout.splitlines()[1]
    assert "outcome must be one of" in (await shell("sessions", "--outcome", "Sand box", code=1)).stderr


async def test_a_shell_offers_what_the_proxy_has(shell):
    for name in ("run-a", "run-b", "other"):
        await record(shell.rig, name, 1)
    await shell("label", "run-a", "--group", "g7", "--tag", "run:r7")

    async def offered(line):
        code = "import sys; sys.argv[0] = 'tokencache'; from tokencache.cli import main; main()"
        words = {"_TOKENCACHE_COMPLETE": "complete_bash", "COMP_WORDS": f"tokencache {line}", "COMP_CWORD": str(len(line.split(" ")))}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env={"TOKENCACHE_PROXY": shell.rig.url, **words}
        )
        return (await process.communicate())[0].decode().split()

    assert sorted(await offered("show run")) == ["run-a", "run-b"]
    assert await offered("sessions --group g") == ["g7"]
    assert await offered("report r") == ["r7"]
    assert await offered("run claude") == ["claude-code"]
    assert await offered("export --format ver") == ["verifiers", "verl"]
    assert await offered("show --proxy http://127.0.0.1:9 run") == [], "nobody answers there"


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
async def test_export_and_verify(shell, tmp_path, ending):
    for name in ("a", "b"):
        await record(shell.rig, name)
    path = str(tmp_path / f"all{ending}")
    result = await shell("export", "--all", "--to", path)
    assert result.stdout == ""
    assert f"2 sessions in {path}: 4 rows, " in result.stderr
    checked = (await shell("verify", path, "--proxy", "not needed", far=False)).stdout
    assert f"{path}: 2 rollouts, 8 turns, " in checked
    assert "all checks passed" in checked
    assert "an export cannot show it" in checked


@pytest.mark.parametrize("wanted", some(FORMATS, 4))
async def test_convert_writes_what_the_proxy_would_have_written(shell, tmp_path, wanted):
    await record(shell.rig, "a")
    await shell("export", "a", "--text", "--to", str(tmp_path / "a.jsonl"))
    await shell("export", "a", "--format", wanted, *(["--text"] if wanted == "native" else []), "--to", str(tmp_path / "b.jsonl"))
    result = await shell("convert", str(tmp_path / "a.jsonl"), "--format", wanted, "--to", str(tmp_path / "c.jsonl"), far=False)
    assert f"1 rollout: 2 rows of format {wanted}" in result.stderr or "1 rollout: 1 row" in result.stderr
    assert (tmp_path / "c.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


async def test_convert_to_parquet_and_back(shell, tmp_path):
    await record(shell.rig, "a")
    await shell("export", "a", "--text", "--to", str(tmp_path / "a.jsonl"))
    await shell("convert", str(tmp_path / "a.jsonl"), "--to", str(tmp_path / "a.parquet"), far=False)
    await shell("convert", str(tmp_path / "a.parquet"), "--to", str(tmp_path / "b.jsonl"), far=False)
    before, after = (msgspec.json.decode((tmp_path / name).read_bytes()) for name in ("a.jsonl", "b.jsonl"))
    assert before == after
    assert "all checks passed" in (await shell("verify", str(tmp_path / "a.parquet"), far=False)).stdout


async def test_convert_leaves_no_manifest_of_the_file_that_it_replaces(shell, tmp_path):
    await record(shell.rig, "a")
    export = str(tmp_path / "a.jsonl")
    await shell("export", "a", "--to", export)
    assert (tmp_path / "a.jsonl.manifest.json").exists()
    await shell("convert", export, "--to", export, "--overwrite", far=False)
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]


async def test_convert_says_what_is_missing(shell, tmp_path):
    await record(shell.rig, "a")
    plain, target = str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    await shell("export", "a", "--to", plain)
    refused = await shell("convert", plain, "--format", "slime", "--to", str(target), far=False, code=1)
    assert "number 1: format slime holds messages, and this export has none" in refused.stderr
    assert not list(tmp_path.glob("b.jsonl*")), "no half a file is left"
    await shell("convert", plain, "--format", "verl", "--to", str(target), far=False)
    assert "exists already" in (await shell("convert", plain, "--format", "verl", "--to", str(target), far=False, code=1)).stderr
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes((tmp_path / "a.jsonl").read_bytes().replace(b'"sim"', b'"sin"', 1))
    refused = await shell("convert", str(changed), "--format", "trl", "--to", str(tmp_path / "c.jsonl"), far=False, code=1)
    assert "(session a) was changed after it was exported" in refused.stderr
    changed.write_bytes((tmp_path / "a.jsonl").read_bytes().replace(b'"a"', b'"\\u001b]0;owned\\u0007"', 1))
    refused = await shell("convert", str(changed), "--format", "trl", "--to", str(tmp_path / "c.jsonl"), far=False, code=1)
    assert "(session  ]0;owned ) was changed" in refused.stderr
    again = await shell("convert", str(target), "--format", "trl", "--to", str(tmp_path / "c.jsonl"), far=False, code=1)
    assert "not a native rollout" in again.stderr


@pytest.mark.parametrize("ending", ["", "/"])
async def test_a_failed_conversion_keeps_its_source_and_leaves_nothing_else(shell, tmp_path, ending):
    await record(shell.rig, "a")
    path, source = tmp_path / "a.jsonl", tmp_path / "a.jsonl.part"  # what an interrupted export leaves
    await shell("export", "a", "--to", str(path))
    path.rename(source)
    whole = source.read_bytes()
    assert "choose another name" in (await shell("convert", str(source), "--to", str(path) + ending, far=False, code=1)).stderr
    assert source.read_bytes() == whole
    (tmp_path / "b.jsonl.gz.part").symlink_to("/dev/full")
    full = await shell("convert", str(source), "--to", str(tmp_path / "b.jsonl.gz") + ending, far=False, code=1)
    assert "No space left on device" in full.stderr
    assert [*tmp_path.glob("b.*")] == []
    for nameless in ("", "/", "."):
        assert "the name must end with" in (await shell("convert", str(source), "--to", nameless, far=False, code=1)).stderr


@pytest.mark.parametrize("wanted", some(FORMATS, 4))
async def test_verify_reads_every_format(shell, tmp_path, wanted):
    await record(shell.rig, "a")
    path = tmp_path / "a.jsonl"
    await shell("export", "a", "--format", wanted, "--to", str(path))
    in_messages = wanted in {"nemo-gym", "verifiers", "prime-rl", "atif"}
    words = "as they were written, by their digest; what they hold was not checked" if in_messages else "all checks passed"
    assert words in (await shell("verify", str(path), far=False)).stdout
    path.write_bytes(path.read_bytes().replace(b'"sim"', b'"sin"', 1))
    result = await shell("verify", str(path), far=False, code=1)
    assert "number 1 was changed" in result.stdout


@pytest.mark.parametrize(("wanted", "column"), [("native", "model"), ("native", "session"), ("trl", "prompt_ids"), ("verl", "num_turns")])
async def test_a_changed_parquet_file_is_found(shell, tmp_path, wanted, column):
    await record(shell.rig, "a")
    path = tmp_path / "a.parquet"
    await shell("export", "a", "--format", wanted, "--to", str(path))
    result = "all checks passed" if wanted == "native" else "as they were written, by their digest; what they hold was not checked"
    assert result in (await shell("verify", str(path), far=False)).stdout
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[0][column] = {"model": "other", "session": "b", "prompt_ids": [1], "num_turns": 1}[column]
    kept = {name: value for name, value in pq.read_metadata(path).metadata.items() if name.startswith(b"tokencache")}
    changed = table.from_pylist(rows, schema=table.schema.remove_metadata())
    pq.write_table(changed, path)
    rewritten = (await shell("verify", str(path), far=False)).stdout
    assert ("2 without a digest" in rewritten) == (wanted != "native"), "another tool wrote the file; native rollouts have their own"
    pq.write_table(changed.replace_schema_metadata(kept), path)
    result = await shell("verify", str(path), far=False, code=1)
    assert "the rows of the file are not those that were written" in result.stdout


async def test_a_digest_that_was_removed_is_missed(shell, tmp_path):
    await record(shell.rig, "a")
    path = tmp_path / "a.jsonl"
    await shell("export", "a", "--to", str(path))
    value = msgspec.json.decode(path.read_bytes())
    del value["digest"]
    path.write_bytes(msgspec.json.encode(value))
    assert "its digest is missing" in (await shell("verify", str(path), far=False, code=1)).stdout


def _swap_first_two(logprobs):
    """Swap the first two log probabilities that differ."""
    sampled = [i for i, value in enumerate(logprobs) if value != 0.0]
    a, b = next((i, j) for i, j in itertools.pairwise(sampled) if logprobs[i] != logprobs[j])
    logprobs[a], logprobs[b] = logprobs[b], logprobs[a]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
async def test_swapped_log_probabilities_in_a_file_are_found(shell, tmp_path, ending):
    await record(shell.rig, "a")
    path = tmp_path / f"a{ending}"
    await shell("export", "a", "--to", str(path))
    if ending == ".jsonl":
        result = msgspec.json.decode(path.read_bytes())
        _swap_first_two(result["sequences"][0]["logprobs"])
        path.write_bytes(msgspec.json.encode(result) + b"\n")
    else:
        table = pq.read_table(path)
        rows = table.to_pylist()
        _swap_first_two(rows[0]["logprobs"])
        pq.write_table(table.from_pylist(rows, schema=table.schema), path)
    checked = (await shell("verify", str(path), far=False, code=1)).stdout
    assert "2 checks FAILED:" in checked, "the hash of the turn and the digest of everything"
    assert "the log probabilities of tokens" in checked


async def test_export_to_standard_output_equals_the_response_of_the_proxy(shell):
    await record(shell.rig, "a")
    result = await shell("export", "a", "--to", "-")
    async with shell.rig.http.get(f"{shell.rig.url}/tokencache/v1/sessions/a/trajectories?drift=off") as answer:
        assert result.stdout == await answer.text() + "\n"


async def test_export_of_another_format(shell, tmp_path):
    await record(shell.rig, "a")
    await shell("export", "a", "--format", "trl", "--to", str(tmp_path / "a.parquet"))
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    answer = await shell.rig.get("/tokencache/v1/sessions/a/trajectories?format=trl")
    assert [row["prompt_ids"] for row in rows] == [row["prompt_ids"] for row in answer["rows"]]
    result = await shell("export", "a", "--format", "nope", "--to", str(tmp_path / "b.jsonl"), code=1)
    assert f"'nope' is not one of: {', '.join(FORMATS)}" in result.stderr


@pytest.mark.parametrize(("policy", "words"), [("drop", "left out"), ("cut", "cut after the last whole turn"), ("mask", "masked")])
async def test_longer_sequences_are_reported(shell, tmp_path, policy, words):
    await record(shell.rig, "a")
    whole = await shell.rig.exported("a")
    longest = max(sequence["tokens"] for sequence in whole["sequences"])
    limits = ("--max-length", str(longest - 1), "--overlong", policy)
    for name in ("native", "verifiers"):
        path = str(tmp_path / f"{name}.jsonl")
        result = await shell("export", "a", "--format", name, "--to", path, *limits)
        assert f"1 sequence longer than the limit: {words}" in result.stderr
    assert "all checks passed" in (await shell("verify", str(tmp_path / "native.jsonl"), far=False)).stdout
    assert "longer than the limit" not in (await shell("export", "a", "--to", str(tmp_path / "whole.jsonl"))).stderr


async def test_sessions_are_deleted_after_the_file_is_complete(shell, tmp_path):
    for name in ("run-a", "run-b", "other"):
        await record(shell.rig, name, 1)
    await shell("finish", "run-a", "run-b")
    path = tmp_path / "a.jsonl"
    result = await shell("export", "--pattern", "run-*", "--to", str(path), "--delete")
    assert "2 deleted from the proxy: run-a, run-b" in result.stderr
    assert [msgspec.json.decode(line)["sealed"] for line in path.read_bytes().splitlines()] == [True, True]
    assert "1 session\n" in (await shell("sessions")).stdout


async def test_a_session_that_is_not_finished_is_neither_sealed_nor_deleted_unless_forced(shell, tmp_path):
    await record(shell.rig, "a", 1)
    result = await shell("export", "a", "--to", str(tmp_path / "a.jsonl"), "--delete")
    assert "1 not sealed and not deleted: not finished, or a call is in flight" in result.stderr
    assert (await shell.rig.info("a"))["state"] == "open"
    result = await shell("export", "a", "--to", str(tmp_path / "b.jsonl"), "--delete", "--force")
    assert "1 INCOMPLETE" in result.stderr, "what was cut is marked"
    assert "1 deleted from the proxy: a" in result.stderr


async def test_incomplete_sessions_are_reported(shell, tmp_path):
    await record(shell.rig, "a", 1)
    await shell.rig.store.begin("a", "a call that never ends", [])
    result = await shell("export", "a", "--to", str(tmp_path / "a.jsonl"), "--delete")
    assert "1 INCOMPLETE: a reply of the model is missing" in result.stderr
    assert "1 not sealed and not deleted: not finished, or a call is in flight (finish it, or use --force): a" in result.stderr
    assert "1 session, 1 incomplete" in (await shell("sessions")).stdout
    assert "incomplete: a (call-open)" in (await shell("verify", str(tmp_path / "a.jsonl"), far=False)).stdout
    result = await shell("export", "a", "--to", str(tmp_path / "b.jsonl"), "--complete-only")
    assert "1 incomplete and left out: a" in result.stderr


async def test_verify_names_the_first_failure(shell, tmp_path):
    await record(shell.rig, "a")
    path = tmp_path / "a.jsonl"
    await shell("export", "a", "--to", str(path))
    good = msgspec.json.decode(path.read_bytes())
    sequence = good["sequences"][0]
    start, _ = sequence["turns"][1]["completion"]
    before = sequence["token_ids"][start - 10 : start]
    sequence["token_ids"][start] += 1
    (tmp_path / "bad.json").write_bytes(msgspec.json.encode(good))
    result = (await shell("verify", str(path), str(tmp_path / "bad.json"), far=False, code=1)).stdout
    assert "bad.json: 1 rollout, 4 turns, " in result
    assert f"session a, sequence {sequence['id']}, turn {sequence['turns'][1]['turn']}, token {start}: " in result
    assert f"… {' '.join(map(str, before))} [{sequence['token_ids'][start]} " in result
    found = msgspec.json.decode((await shell("verify", "--json", str(tmp_path / "bad.json"), far=False, code=1)).stdout)
    assert found[0]["breaks"][0]["check"] == "hashes"
    assert found[0]["breaks"][0]["token"] == start


async def test_verify_finds_what_occurs_twice_in_any_format(shell, tmp_path):
    """Files that were joined may have a session in both: it would be trained twice."""
    await record(shell.rig, "a")
    for form in FORMATS:
        once, twice = tmp_path / f"{form}.jsonl", tmp_path / f"{form}-twice.jsonl"
        await shell("export", "a", "--format", form, "--to", str(once))
        twice.write_bytes(once.read_bytes() * 2)
        rows = len(once.read_bytes().splitlines())
        await shell("verify", str(once), far=False)
        assert f"occurs twice: number 1 and number {rows + 1}" in (await shell("verify", str(twice), far=False, code=1)).stdout


async def test_verify_of_a_session_and_of_unreadable_files(shell, tmp_path):
    await record(shell.rig, "a")
    assert "a: 1 rollout, 4 turns, " in (await shell("verify", "a")).stdout
    assert "there is no session 'nope'" in (await shell("verify", "nope", code=1)).stderr
    assert "cannot be read" in (await shell("verify", str(tmp_path / "no.jsonl"), far=False, code=1)).stderr
    (tmp_path / "other.jsonl").write_text('{"session": "x", "rows": []}\n')
    assert (
        "number 1 is no row of a format of tokencache" in (await shell("verify", str(tmp_path / "other.jsonl"), far=False, code=1)).stdout
    )
    (tmp_path / "nasty.jsonl").write_text('{"session": "\\u001b]0;owned\\u0007"}\n')
    assert "\x1b" not in (await shell("verify", str(tmp_path / "nasty.jsonl"), far=False, code=1)).stdout
    (tmp_path / "empty.jsonl").write_text("")
    assert "contains no rollout" in (await shell("verify", str(tmp_path / "empty.jsonl"), far=False, code=1)).stdout


@pytest.mark.parametrize(
    "case",
    [
        (["export", "--to", "a.jsonl"], 2, "give session names, or --all"),
        (["export", "a", "--all", "--to", "a.jsonl"], 2, "give session names, or --all"),
        (["export", "--all", "--to", "-", "--delete"], 2, "--delete needs a file"),
        (["export", "--all"], 2, "--to"),
        (["export", "--all", "--to", "a.jsonl"], 1, "there is no session yet"),
        (["export", "--pattern", "x*", "--to", "a.jsonl"], 1, "there is no session that matches x*"),
        (["export", "a", "--to", "a.jsonl", "--max-length", "9"], 1, "overlong must be one of: drop, cut, mask"),
        (["export", "a", "--to", "a.jsonl", "--overlong", "cut"], 1, "overlong needs a limit: max_length"),
        (["export", "a", "--to", "a.jsonl", "--max-length", "0", "--overlong", "cut"], 2, "--max-length"),
        (["export", "a", "--to", "a.csv"], 1, "must end with .jsonl"),
        (["export", "a", "--to", "a.jsonl"], 1, "there is no session 'a'"),
    ],
)
async def test_impossible_requests_fail_and_write_nothing(shell, tmp_path, monkeypatch, case):
    args, code, words = case
    monkeypatch.chdir(tmp_path)
    result = await shell(*args, code=code)
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "a.jsonl").exists()


async def test_the_admin_key_is_required():
    async with proxied(admin_key="secret") as rig:
        assert "--admin-key" in (await Shell(rig)("sessions", code=1)).stderr
        assert (await Shell(rig, "secret")("sessions")).stdout == "0 sessions\n"


async def test_an_interrupted_export_reports_what_was_written(shell, tmp_path):
    """Ctrl-C while the response for the second session hangs. The fifth session is fetched once the first is written."""
    for name in "abcde":
        await record(shell.rig, name, 1)
    await shell("finish", *"abcde")
    held = asyncio.Event()
    turns = shell.rig.store.turns

    async def slow(session):
        if session == "b":
            await held.wait()
        return await turns(session)

    shell.rig.store.turns = slow
    path = tmp_path / "a.jsonl"
    command = [str(Path(sys.executable).parent / "tokencache"), "export", "--all", "--to", str(path), "--delete", *shell.options]
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a test run in the background of a script ignores it
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, preexec_fn=hears)
    with contextlib.ExitStack() as stack:
        stack.callback(held.set)

        async def first_is_written():
            return (await shell.rig.info("e"))["sealed"]

        await until(first_is_written)
        process.send_signal(signal.SIGINT)
        _, result = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == 130
    assert f"stopped: {path}.part holds 1 of 5 sessions; nothing was deleted" in result.decode()
    assert not path.exists()
    assert (await shell.rig.info("a"))["turns"] == 2


async def test_export_leaves_old_versions_out_and_says_so(shell, tmp_path):
    result = await shell("export", "--all", "--to", str(tmp_path / "none.jsonl"), "--max-lag", "1", code=1)
    assert "there is no session" in result.stderr
    await shell.rig.say("unknown", [user("hi")])
    refused = await shell("export", "--all", "--to", str(tmp_path / "none.jsonl"), "--max-lag", "1", code=1)
    assert "none was announced" in " ".join(refused.stderr.split())
    for version in ("7", "9"):
        await shell("weights", "set", version)
        await shell.rig.say(f"with-{version}", [user("hi")])
    result = await shell("export", "--all", "--to", str(tmp_path / "a.jsonl"), "--max-lag", "1")
    words = " ".join(result.stderr.split())
    assert "1 sequence left out: older than --max-lag allows" in words
    assert "1 sequence left out: how old their policy versions are is not known" in words
    rollouts = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert {one["session"]: len(one["sequences"]) for one in rollouts} == {"unknown": 0, "with-7": 0, "with-9": 1}
    await shell("verify", str(tmp_path / "a.jsonl"), far=False)

"""Tests the tools that the harness tests rely on. No engine, no harness, seconds."""

import json
import sys

import namespace
import pytest
import table
from aiohttp import web
from recording_relay import RecordingRelay, read_calls
from rig.server import LIMIT_S

from tests.support.material import require

ASK = """
import http.client, json, os, socket, sys
port, host_port = map(int, sys.argv[1:])
def reached(port):
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
        return True
    except OSError:
        return False
http_ = http.client.HTTPConnection("127.0.0.1", port)
http_.request("POST", "/s/x/v1/odd%20path?a=%2F&b", '{"text":  "caf\\\\u00e9"}'.encode(), {"X-Mine": "1", "User-Agent": "me"})
answer = http_.getresponse()
found = {
    "interfaces": [name for _, name in socket.if_nameindex()],
    "host": reached(host_port),
    "answer": [answer.status, answer.getheader("X-Theirs"), answer.read().decode()],
    "environment": sorted(os.environ),
    "cwd": os.getcwd(),
    "others": [int(name) for name in os.listdir("/proc") if name.isdigit()],
}
open("made.txt", "w").write("here")
print(json.dumps(found))
"""


@pytest.fixture
async def upstream():
    """Answers every call with what it received of it, in three pieces."""
    got = []

    async def answer(request):
        got.append((request.method, request.raw_path, request.raw_headers, await request.read()))
        shown = web.StreamResponse(status=202, headers={"X-Theirs": "yes"})
        await shown.prepare(request)
        for piece in (b"data: 1\n\n", b"data: \xe2\x98\x83\n\n", b"data: [DONE]\n\n"):
            await shown.write(piece)
        return shown

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1], got
    await runner.cleanup()


async def ask(folder, upstream_port, code, *words, **limits):
    namespace.prepare(folder)
    port = namespace.port()
    async with RecordingRelay(f"http://127.0.0.1:{upstream_port}", folder / "way-out", folder / "calls.jsonl"):
        command = [sys.executable, "-c", code, str(port), *map(str, words)]
        return await namespace.run_isolated(
            command, folder, {"PATH": "/usr/bin"}, folder / "way-out", port, **{"seconds": LIMIT_S, **limits}
        )


async def test_only_the_socket_leads_out_of_the_namespace(upstream, tmp_path):
    port, _ = upstream
    ended = await ask(tmp_path, port, ASK, port)
    assert ended.returncode == 0, ended.output
    found = json.loads(ended.stdout)
    require("network namespaces", ended.isolated)
    assert found["interfaces"] == ["lo"]
    assert not found["host"]
    assert found["cwd"] == str(namespace.WORK)
    assert len(found["others"]) <= 2
    assert set(found["environment"]) <= {"HOME", "TMPDIR", "LANG", "TERM", "USER", "TZ", "PATH", "LC_CTYPE"}
    assert (tmp_path / "work/made.txt").read_text() == "here"
    assert not namespace.RUN_DIR.exists() or not any(namespace.RUN_DIR.iterdir()), "nothing is left outside"


async def test_the_relay_forwards_unchanged_what_it_records(upstream, tmp_path):
    port, got = upstream
    ended = await ask(tmp_path, port, ASK, port)
    assert json.loads(ended.stdout)["answer"] == [202, "yes", "data: 1\n\ndata: ☃\n\ndata: [DONE]\n\n"]
    ((method, path, headers, body),) = got
    (call,) = read_calls(tmp_path / "calls.jsonl")
    assert (call["method"], call["path"]) == (method, path) == ("POST", "/s/x/v1/odd%20path?a=%2F&b")
    assert call["request_body"].encode() == body == b'{"text":  "caf\\u00e9"}'
    assert call["request_headers"] == [[name.decode(), value.decode()] for name, value in headers]
    assert (call["status"], call["response_body"], call["left"]) == (202, "data: 1\n\ndata: ☃\n\ndata: [DONE]\n\n", False)
    assert sum(call["chunks"]) == len(call["response_body"].encode())
    assert ["X-Theirs", "yes"] in call["response_headers"]


async def test_a_harness_that_runs_too_long_is_killed(upstream, tmp_path):
    port, _ = upstream
    ended = await ask(tmp_path, port, "import time; time.sleep(600)", seconds=1)
    assert ended.returncode == 124


async def test_without_namespaces_it_runs_and_reports_it(upstream, tmp_path, monkeypatch):
    """A machine that permits no namespaces runs the harnesses anyway, and the report says that they were not isolated."""
    monkeypatch.setattr(namespace, "NAMESPACES", ["false"])
    namespace.namespaces.cache_clear()
    try:
        port, _ = upstream
        code = "import os, socket; print(os.environ['HTTPS_PROXY'], len(socket.if_nameindex()))"
        ended = await ask(tmp_path, port, code)
        assert namespace.port() != namespace.PORT
    finally:
        namespace.namespaces.cache_clear()
    assert ended.returncode == 0, ended.output
    assert not ended.isolated
    assert ended.stdout.split()[0] == "http://127.0.0.1:9"
    assert "WITHOUT NAMESPACES" in namespace.remark([ended])
    isolated = namespace.Ended(0, "", "", isolated=True)
    assert namespace.remark([isolated]) == ""
    assert "WITHOUT NAMESPACES" in namespace.remark([isolated, ended])


async def test_an_interrupt_follows_the_given_words(upstream, tmp_path):
    """SIGINT follows after the given words have been delivered that many times, not after a delay."""
    code = """
import http.client, signal, sys, time
def hear(*_):
    print("interrupted")
    raise SystemExit(0)
signal.signal(signal.SIGINT, hear)
there = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
for n in range(2):
    there.request("GET", f"/{n}")
    print("heard", there.getresponse().read().count(b"data: 1"), flush=True)
    time.sleep(1)
time.sleep(600)
"""
    port, got = upstream
    ended = await ask(tmp_path, port, code, interrupt=("data: 1", 2))
    assert (ended.returncode, len(got)) == (0, 2)
    words = ended.stdout.split()
    assert (words[:2], words[-1]) == (["heard", "1"], "interrupted")  # not in the first answer, which has them only once


def measured(version, *sequences):
    return table.Measured(version, calls=3, proxied=(1, 2), sequences=list(sequences), rules=("args-json",))


def test_a_program_that_did_not_run_keeps_its_row(tmp_path, monkeypatch):
    rows = [table.Row("job", title, "chat") for title in ("One", "Two", "Never")]
    rows += [table.Row("structures", "One", "a | b"), table.Row("images", "One", "a file")]
    page = tmp_path / "page.md"
    monkeypatch.setattr(table, "FOUND", {row: measured("1.0", ("root", "", 3)) for row in rows if row.title != "Never"})
    table.write(rows, {"Never": "not there", "Two": "not installed"}, page)
    before = page.read_text().splitlines()
    monkeypatch.setattr(table, "FOUND", {rows[1]: measured("2.0", ("root", "", 1), *[("resplice", "context-edited", 1)] * 2)})
    table.write(rows, {"Never": "not there", "One": "not installed"}, page)
    after = page.read_text().splitlines()
    ((old, new),) = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert "| Two | 1.0 | chat | 3 | 2 | not measured | 1 | root 3 | `args-json` | 3 of 3 |" in old
    assert "| Two | 2.0 | chat | 3 | 2 | not measured | 1 | root 1, 2 times resplice 1 (context-edited) | `args-json` | 3 of 3 |" in new
    assert after[-1] == "| Never | not there |"

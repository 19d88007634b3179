"""The log holds neither what was said nor a key: a real proxy in a process of its own, a bad day, and what it wrote."""

import asyncio
import json
import logging
import os
import re
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, echo, proxied, results, user
from tests.support.waiting import PATIENCE, until
from tokencache.logs import JsonFormatter, LineFormatter
from tokencache.testing import Fault, SimulatedEngine

CANARY = "canary7f3a"
ADMIN, HARNESS, ENGINE = f"admin-{CANARY}-admin-admin", f"sk-{CANARY}", f"sk-engine-{CANARY}"
API = "/tokencache/v1"
REFUSAL = json.dumps({"error": {"message": f"bad: {CANARY}", "type": "X", "param": None, "code": 400}})


class Running:
    """`tokencache serve` in a process, and all that it wrote."""

    def __init__(self, *options):
        self._command = [str(Path(sys.executable).with_name("tokencache")), "serve", "--port", "0", *options]
        self.url, self.written = "", ""

    async def __aenter__(self):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENCACHE_")}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env=environment | {"TOKENCACHE_ADMIN_KEY": ADMIN, "TOKENCACHE_UPSTREAM_KEY": ENGINE},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reading = asyncio.create_task(self._read())
        await until(self._listens, "the proxy listens")
        return self

    async def _read(self):
        while line := await self._process.stdout.readline():
            self.written += line.decode()

    async def _listens(self):
        found = re.search(r"listens on (http://\S+)", self.written)
        self.url = found[1] if found else ""
        assert self._process.returncode is None, self.written
        return self.url

    async def __aexit__(self, *why):
        if self._process.returncode is None:
            self._process.terminate()
        await asyncio.wait_for(self._process.wait(), PATIENCE)
        await self._reading


async def ask(http, url, path=CHAT, *, method="POST", headers=None, data=None, **body):
    """Ask, whatever comes of it."""
    body = data if data is not None else json.dumps(body)
    sent = {HEADER: "s", "Authorization": f"Bearer {HARNESS}", "Content-Type": "application/json", **(headers or {})}
    try:
        async with http.request(method, url + path, data=body, headers=sent) as answer:
            return answer.status, await answer.read()
    except (aiohttp.ClientError, ConnectionError):
        return None, b""


async def a_bad_day(http, url, engine):
    """Traffic with words and keys in all places, most of which fails somewhere."""
    trainer = {"Authorization": f"Bearer {ADMIN}"}
    talk = [user("EPISODE:demo"), {"role": "user", "content": CANARY}]
    model, said = {"model": "sim", "tools": TOOLS}, {"messages": talk}
    _, first = await ask(http, url, **model, **said)
    message = json.loads(first)["choices"][0]["message"]
    grown = [*talk, echo(message), *results(message, CANARY)]
    _, registered = await ask(http, url, f"{API}/keys", headers=trainer, session="k", tenant=CANARY)
    key = json.loads(registered)["key"]
    await ask(http, url, headers={"Authorization": f"Bearer {key}"}, **model, **said)
    await ask(http, url, f"{API}/keys/{json.loads(registered)['id']}", method="DELETE", headers=trainer)
    await ask(http, url, headers={"Authorization": f"Bearer {key}"}, **model, **said)  # it is revoked
    # the engine complains, and quotes
    refused = [Fault.answer(status, REFUSAL) for status in (400, 422, 500)]
    engine.choose_fault = lambda _, body: Fault.error_event(2, CANARY) if len(body.get("messages", ())) == len(grown) else None
    for stream in (False, True):  # not in the queue of faults, where a probe may take it
        await ask(http, url, **model, messages=grown, stream=stream)
    engine.choose_fault = None
    for faults in (refused[:2], [refused[0]] * 2, [refused[2]], [Fault.cut(2)], [Fault.close()]):
        for stream in (False, True):
            engine.faults.extend(faults)
            await ask(http, url, **model, messages=grown, stream=stream)
            engine.faults.clear()
    engine.faults.extend([Fault.answer(200, f'{{"choices": "{CANARY}"'), Fault.answer(200, json.dumps({"choices": [{"x": CANARY}]}))])
    for _ in range(2):
        await ask(http, url, **model, **said)
    engine.faults.extend([Fault.answer(400, REFUSAL, path="/tokenize")] * 3)
    await ask(http, url, **model, messages=[*grown, {"role": "user", "content": "further"}])
    await ask(http, url, "/tokenize", **model, messages=grown)
    engine.faults.clear()
    # the harness sends what nobody can read
    arguments = [{"id": CANARY, "type": "function", "function": {"name": CANARY, "arguments": f'{{"{CANARY}": '}}]
    odd = [{"role": "assistant", "content": None, "tool_calls": arguments}, {"role": CANARY, "content": CANARY}]
    bodies = [f'{{"{CANARY}"', f'"{CANARY}"', json.dumps({"messages": CANARY}), json.dumps({"model": 5, "messages": [CANARY]})]
    for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1beta/models/sim:generateContent"):
        for data in bodies:
            await ask(http, url, path, data=data.encode())
    await ask(http, url, data=json.dumps({**model, "messages": [{"role": "user", "content": "\ud800" + CANARY}]}).encode())
    await ask(http, url, **model, messages=[*talk, *odd])
    await ask(http, url, **model, **said, chat_template_kwargs={CANARY: CANARY}, documents=[{"text": CANARY}])
    await ask(http, url, model=CANARY, **said)
    # keys where they do not belong
    for path in (
        f"/v1beta/models/sim:generateContent?key={HARNESS}",
        f"/v1beta/models/sim:generateContent?key=tck-{CANARY}",
        f"/nope?key={HARNESS}",
    ):
        await ask(http, url, path, contents=[{"role": "user", "parts": [{"text": CANARY}]}])
    await ask(http, url, f"{API}/sessions", method="GET", headers={"Authorization": f"Bearer {CANARY}"})
    await ask(http, url, f"{API}/keys", headers=trainer, data=f'{{"session": "{CANARY} {CANARY}"}}'.encode())
    for raw in (f"GET /?key={CANARY} HTTP/9\r\n\r\n", f"POST / HTTP/1.1\r\nX: {CANARY}\x00\r\n\r\n", f"{CANARY}\r\n\r\n"):
        await bare(url, raw.encode())
    # the engine goes away while a reply is under way
    engine.faults.append(Fault.close(after=2))
    await ask(http, url, **model, **said, stream=True)


async def bare(url, data):
    """Send bytes that are no request, and wait for the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()


@pytest.mark.parametrize(("level", "told"), [("info", False), ("debug", True)])
async def test_neither_words_nor_keys_are_logged_unless_debugging_is_asked_for(level, told):
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    options = ("--log-level", level, "--hold", "0")
    async with (
        engine.serve() as up,
        aiohttp.ClientSession() as http,
        Running("--upstream", up.replace("//", f"//user:{CANARY}@"), *options) as proxy,
    ):
        await a_bad_day(http, proxy.url, engine)
        _, listed = await ask(http, proxy.url, f"{API}/sessions/s", method="GET", headers={"Authorization": f"Bearer {ADMIN}"})
    incidents = json.loads(listed)["incidents"]
    kinds = {incident["kind"] for incident in incidents}
    assert kinds >= {"engine-refused", "engine-error", "upstream-broke", "call-refused"}
    assert any(CANARY in incident.get("detail", "") for incident in incidents), "the trainer has the engine's words"
    logged = kinds - {"call-refused"} | {"invalid_request_error"}  # what was wrong with the call
    assert all(f": {kind}" in proxy.written for kind in logged), proxy.written
    assert (CANARY in proxy.written) is told, [line for line in proxy.written.splitlines() if CANARY in line]
    keys = (ADMIN, HARNESS, ENGINE, f"tck-{CANARY}", f":{CANARY}@")
    assert not [line for line in proxy.written.splitlines() if any(key in line for key in keys)]


def record(message, *values, error=None, name="tokencache.x"):
    info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord(name, logging.ERROR, __file__, 1, message, values, info)


def failing():
    try:
        try:
            return {}[CANARY]
        except KeyError as why:
            raise ValueError(CANARY) from why
    except ValueError as why:
        return why


def test_of_an_exception_the_place_is_said_and_its_words_only_if_wanted():
    quiet, loud = (LineFormatter(messages=words).format(record("it failed", error=failing())) for words in (False, True))
    assert CANARY not in quiet
    assert quiet.count("test_logs.py:") == 2
    assert [name in quiet for name in ("builtins.ValueError", "builtins.KeyError", "failing")] == [True] * 3
    assert CANARY in loud


@pytest.mark.parametrize("stream", [False, True])
async def test_each_call_is_one_line(stream, caplog):
    caplog.set_level(logging.INFO, "tokencache.proxy.call")
    named = {"X-Request-ID": "mine-7"}
    async with proxied() as rig:
        message = await rig.say("s", [user("EPISODE:demo")], tools=TOOLS)
        body = {"model": "sim", "messages": [user("EPISODE:demo"), echo(message), *results(message)], "tools": TOOLS, "stream": stream}
        async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s", **named}) as answer:
            assert answer.headers["X-Request-ID"] == "mine-7"
            await answer.read()
        first, second = await rig.turns()
        rig.engine.faults.append(Fault.answer(500, "{}"))
        await rig.post("s", messages=[user("EPISODE:demo"), user(CANARY)], stream=stream, named="mine-8")
    begun, continued, failed = [one for one in caplog.records if one.name == "tokencache.proxy.call"]
    tokens = f"{second['prompt_tokens']} + {second['completion_tokens']} tokens"
    assert begun.getMessage().startswith(f"session s call {first['call']}: root, ")
    assert continued.getMessage().startswith(f"session s call {second['call']}: continue, {tokens}, ")
    assert continued.getMessage().endswith(" ms, tool_calls, request mine-7")
    assert failed.getMessage().endswith(": engine-refused (the engine answered 500), request mine-8")
    assert (failed.fields["ended"], failed.fields["status"], failed.fields["request_id"]) == ("engine-refused", 500, "mine-8")
    line = json.loads(JsonFormatter(messages=False).format(continued))
    assert (line["level"], line["session"], line["call"], line["match"]) == ("info", "s", second["call"], "continue")
    assert (line["completion_tokens"], line["request_id"], line["ended"]) == (second["completion_tokens"], "mine-7", "tool_calls")


@pytest.mark.parametrize(
    ("path", "body", "session", "status"),
    [
        (CHAT, [], "s", 400),
        ("/v1/messages", {"messages": 1}, "s", 400),
        (CHAT, {}, "no name", 400),
        (CHAT, {"messages": "x" * 3000}, "s", 413),
    ],
)
async def test_a_request_that_is_refused_before_its_call_begins_is_one_line_too(caplog, path, body, session, status):
    caplog.set_level(logging.INFO, "tokencache")
    sent = {HEADER: session, "X-Request-ID": "mine-9"}
    async with proxied(max_body=2000) as rig, rig.http.post(rig.url + path, json=body, headers=sent) as answer:
        assert (answer.status, answer.headers["X-Request-ID"]) == (status, "mine-9")
    (line,) = [one for one in caplog.records if "mine-9" in one.getMessage()]
    named = f"session {session}" if session == "s" else "no session"
    assert line.getMessage() == f"{named} POST {path}: invalid_request_error (answered with {status}), request mine-9"
    assert (line.levelname, line.fields["status"], line.fields["request_id"]) == ("INFO", status, "mine-9")


async def test_a_request_id_that_is_no_plain_word_comes_back_and_is_not_logged(caplog):
    caplog.set_level(logging.INFO, "tokencache.proxy.call")
    async with proxied() as rig:
        body = {"model": "sim", "messages": [user("EPISODE:demo")]}
        async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s", "X-Request-ID": f"{CANARY} x"}) as answer:
            assert answer.headers["X-Request-ID"] == f"{CANARY} x"
    assert CANARY not in caplog.text


def test_a_record_is_an_object_a_line():
    line = json.loads(JsonFormatter(messages=False).format(record("session %s", "a\n\x1b", error=failing())))
    assert (line["level"], line["logger"], line["message"]) == ("error", "tokencache.x", "session a\n\x1b")
    assert "builtins.ValueError" in line["exception"]
    assert CANARY not in line["exception"]


def test_the_time_of_a_line_is_written_as_logging_does():
    made = record("one")
    made.created, made.msecs = 1764260402.0625, 62.0
    assert LineFormatter(messages=False).format(made) == logging.Formatter(f"%(asctime)s {made.levelname} {made.name}: one").format(made)


def test_a_line_stays_one_line():
    line = LineFormatter(messages=False).format(record("session %s", "a\n2026 ERROR forged\x1b[2J\u2028x"))
    assert len(line.splitlines()) == 1
    assert "a\\n2026 ERROR forged\\x1b[2J\\u2028x" in line


def test_a_task_that_nobody_asked_shows_no_result():
    text = "Task exception was never retrieved\nfuture: <Task finished exception=ValueError('canary7f3a')>"
    assert CANARY not in LineFormatter(messages=False).format(record(text, name="asyncio", error=failing()))
    assert CANARY in LineFormatter(messages=True).format(record(text, name="asyncio"))

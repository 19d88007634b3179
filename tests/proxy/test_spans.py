"""Spans of OpenTelemetry, with the real SDK: one for each call, with what a trace needs and no text."""

import asyncio
import logging
import subprocess
import sys

import pytest
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.proxy.kit import CHAT, HEADER, echo, proxied, user
from tests.proxy.test_retries import ASK, RETRY, gate, open_calls, send, wanted
from tests.support.waiting import until
from tokencache.config import Settings
from tokencache.server.app import Proxy
from tokencache.testing import Fault, SimulatedEngine

TEXT = "a word that no trace may have"
EPISODES = {"e": [f"One, {TEXT}.", "Two.", "Three."]}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exported(monkeypatch):
    """What was exported when the proxy has stopped."""
    kept = InMemorySpanExporter()
    monkeypatch.setattr(trace_exporter, "OTLPSpanExporter", lambda: kept)
    return kept.get_finished_spans


async def test_a_span_for_each_call(exported):
    async with proxied(SimulatedEngine(episodes=EPISODES), traces=True) as rig:
        asked = [user(f"EPISODE:e {TEXT}")]
        sent = {HEADER: "s", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        async with rig.http.post(rig.url + CHAT, json={"model": "sim", "messages": asked}, headers=sent) as answer:
            asked += [echo((await answer.json())["choices"][0]["message"]), user("go on")]
        await rig.say("s", asked, stream=True)
        rig.engine.faults.append(Fault.answer(500, f'{{"error": {{"message": "{TEXT}"}}}}'))
        assert (await rig.post("t", messages=asked[:1]))[0] == 500
        turns = await rig.turns()
    first, second, failed = exported()
    for span, turn in zip((first, second), turns, strict=True):
        assert (span.name, span.kind, span.status.status_code) == ("chat sim", SpanKind.CLIENT, StatusCode.UNSET)
        assert dict(span.attributes) == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": "sim",
            "gen_ai.response.model": "sim",
            "gen_ai.conversation.id": "s",
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.input_tokens": turn["prompt_tokens"],
            "gen_ai.usage.output_tokens": turn["completion_tokens"],
            "tokencache.call": turn["call"],
            "tokencache.turn": turn["turn"],
            "tokencache.match": turn["match"],
            "tokencache.dialect": "chat",
            "tokencache.outcome": "answered",
        }
        assert span.start_time == pytest.approx(turn["created"] * 1e9)
        assert span.end_time >= span.start_time
    assert [turn["match"] for turn in turns] == ["root", "continue"]
    assert (f"{first.context.trace_id:032x}", f"{first.parent.span_id:016x}") == (TRACE, PARENT)
    assert second.parent is None
    assert first.resource.attributes["service.name"] == "tokencache"
    assert failed.status.status_code is StatusCode.ERROR
    assert {name: failed.attributes[name] for name in ("error.type", "tokencache.outcome", "http.response.status_code")} == {
        "error.type": "engine-refused", "tokencache.outcome": "engine-refused", "http.response.status_code": 500,
    }  # fmt: skip
    assert TEXT not in "".join(span.to_json() for span in exported())


async def test_a_reply_that_breaks_off_is_an_error(exported):
    async with proxied(SimulatedEngine(episodes=EPISODES), traces=True) as rig:
        rig.engine.faults.append(Fault.cut(after=2))
        asked = {"model": "sim", "messages": [user("EPISODE:e")], "stream": True}
        async with rig.http.post(rig.url + CHAT, json=asked, headers={HEADER: "s"}) as answer:
            await answer.text()
    (span,) = exported()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == span.attributes["tokencache.outcome"] == "upstream-broke"


async def test_calls_without_a_turn_have_a_span_and_a_line_too(exported, caplog):
    caplog.set_level(logging.INFO, "tokencache.proxy.call")
    async with proxied(SimulatedEngine(episodes=EPISODES), traces=True) as rig:
        go = gate(rig)
        first = asyncio.create_task(send(rig, ASK, **RETRY))
        await until(lambda: open_calls(rig))
        joined = asyncio.create_task(send(rig, ASK, **RETRY, **{"X-Request-ID": "joined-1"}))
        await wanted(rig)
        go.set()
        assert [(await one)[0] for one in (first, joined)] == [200, 200]
        assert (await send(rig, ASK, **RETRY))[0] == 200
        refused = [await send(rig, {**ASK, "required_prefix_token_ids": [1]})]
        async with rig.http.post(f"{rig.url}/tokencache/v1/sessions/s/finish"):
            refused.append(await send(rig, ASK))
        assert [status for status, _ in refused] == [400, 409]
    ended = ["answered", "retry-joined", "retry-replayed", "invalid_request_error", "session_finished"]
    spans = sorted(exported(), key=lambda span: ended.index(span.attributes["tokencache.outcome"]))
    assert [span.attributes["tokencache.outcome"] for span in spans] == ended
    assert [span.attributes.get("error.type") for span in spans] == [None] * 3 + ended[3:]
    assert [span.attributes.get("http.response.status_code") for span in spans] == [None] * 3 + [400, 409]
    assert len({span.attributes["tokencache.call"] for span in spans}) == 5
    lines = [one for one in caplog.records if one.name == "tokencache.proxy.call"]
    assert [one.fields["call"] for one in lines] == [span.attributes["tokencache.call"] for span in spans]
    assert [one.getMessage().partition(": ")[2] for one in lines[1:]] == [
        "retry-joined, request joined-1",
        "retry-replayed",
        "invalid_request_error (answered with 400)",
        "session_finished (answered with 409)",
    ]


def test_without_the_setting_nothing_of_it_is_imported():
    script = "import sys, tokencache.server.app; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_without_the_extra_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "tokencache.proxy.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ValueError, match=r"--traces needs the extra 'otel' \(opentelemetry.exporter.otlp.proto.http is missing\)"):
        Proxy(Settings(traces=True))

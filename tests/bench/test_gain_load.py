"""The parts of `bench.gain_load` that need no vLLM: recorded requests for another engine, tables, page."""

import json
from types import SimpleNamespace

import pytest

from bench.gain_load import Player, recordings
from bench.gain_report import load, parts, workload
from bench.tables import DOCS, filled
from tokencache.testing import build_tokenizer


def row(target, tokens, **more):
    figures = {"calls": 100, "calls_per_s": 12.34, "ttft_p50_ms": 80.0, "ttft_p99_ms": 1200.0, "api_cpu_ms": 20.0, "front_cpu_ms": 2.5}
    return {"target": target, "tokens": tokens, "found_cached": 0.987, **figures, **more}


def played(target, harness, queries, hits):
    return {"target": target, "harness": harness, "calls": 7, "queries": queries, "hits": hits}


LOAD = [row(target, tokens) for target in ("direct", "proxy") for tokens in (8_000, 32_000)]
WORKLOAD = [played("direct", "a", 100, 50), played("direct", "b", 300, 100), played("proxy", "a", 100, 90), played("proxy", "b", 300, 270)]


def test_the_targets_of_one_length_are_next_to_each_other():
    shown = load(LOAD)
    assert [cells[:2] for cells in shown.rows] == [["8,000", "direct"], ["", "proxy"], ["32,000", "direct"], ["", "proxy"]]
    assert shown.rows[1][2:] == ["100", "12.3", "80", "1,200", "20.0", "50", "2.5", "98.7 %"]
    assert shown.rows[0][8] == "", "nothing is in front of the engine"


def test_the_last_row_is_for_all_programs():
    shown = workload(WORKLOAD)
    assert shown.rows == [
        ["a", "7", "50.0 %", "90.0 %", "50", "10"],
        ["b", "7", "33.3 %", "90.0 %", "200", "30"],
        ["all", "14", "37.5 %", "90.0 %", "250", "40"],
    ]


def test_the_page_has_a_place_for_each_table():
    machine = {"date": "d", "cores": 2, "cpu": "c", "memory_gib": 1.0, "system": "s", "python": "3", "load_average": [0.1]}
    found = {"load": LOAD, "workload": WORKLOAD, "machine": {**machine, "versions": {"tokencache": "0"}}}
    written = filled((DOCS / "gain.md").read_text(), parts({**found, "vllm": "0.32.0", "model": "one layer", "seconds": 60}))
    assert "| 32,000 | direct | 100 |" in written
    assert "| all | 14 |" in written


@pytest.fixture
def player():
    return Player("proxy plugin pi", SimpleNamespace(tokenizer=build_tokenizer()))


def test_recorded_requests_have_the_ids_of_calls_that_were_served_now(player):
    recording = next(one for one in recordings() if one.header.harness == "pi")
    for call in recording.calls:
        body = player.body(call)
        assert player.name in json.dumps(body["messages"][0])
        assert build_tokenizer().decode(body["vllm_xargs"]["say"]) == call.said
        asked = [one["id"] for message in body["messages"] for one in message.get("tool_calls") or ()]
        assert all(one.startswith("now-") for one in asked)
        calls = [{"index": n, "id": f"now-{call.call}-{n}", "function": {}} for n in range(len(call.served))]
        event = {"choices": [{"index": 0, "delta": {"tool_calls": calls}}]}
        player.served(call, f"data: {json.dumps(event)}\n\n")
    assert asked, "the last request has calls in its history"


def test_a_reply_with_other_calls_is_an_error(player):
    call = next(call for one in recordings() for call in one.calls if call.served)
    with pytest.raises(RuntimeError, match="the recorded reply has"):
        player.served(call, 'data: {"choices": []}\n\n' if call.stream else '{"choices": []}')


def test_programs_with_images_or_another_dialect_are_not_played():
    harnesses = {one.header.harness for one in recordings()}
    assert {"opencode", "pi", "langgraph"} <= harnesses
    assert not {name for name in harnesses if "images" in name or "claude" in name}

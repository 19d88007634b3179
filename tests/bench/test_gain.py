"""The parts of `bench.gain` that need no vLLM: messages, requests, parsing of streams, tables, page, picture."""

import json
import random
import re

import pytest

from bench import gain_report
from bench.gain import FULL
from bench.gain_engine import Engine, counted
from bench.gain_report import bodies, first_tokens, parts, points, tables
from bench.gain_rollout import LONG, TOOL, CallTarget, Rollout, agent, assembled, chat
from bench.plots import draw_gain
from bench.tables import DOCS, filled
from tokencache.testing import build_tokenizer


def record(target="direct", kind="loop", mark=2000, ttft=100.0, *, queries=2000, hits=1000, drift=0.1):
    api = {"api_cpu_ms": 10.0, "proxy_cpu_ms": 2.0, "prompt_tokens": queries}
    return {"target": target, "kind": kind, "mark": mark, "ttft_ms": ttft, "queries": queries, "hits": hits, "drift": drift, **api}


@pytest.fixture
def found():
    """A run with every table in it."""
    calls = [
        record(target, kind, mark, ttft, drift=drift)
        for kind in gain_report.WORDS
        for drift in (0.1, 0.0)
        for mark in (2000, 4000)
        for target, ttft in (("direct", 300.0), ("proxy", 100.0))
    ]
    cpu = {"messages": [20.0, 22.0, 21.0], "ids": [9.0, 8.0, 10.0], "prefix": [7.0, 8.0, 7.4]}
    kinds = {name: {"api_cpu_ms": values} for name, values in cpu.items()}
    machine = {"date": "d", "cores": 2, "cpu": "c", "memory_gib": 1.0, "system": "s", "python": "3", "load_average": [0.1]}
    return {
        "calls": calls,
        "bodies": [{"mark": 2000, "tokens": 1990, "messages": 14, "bodies": kinds}],
        "machine": {**machine, "versions": {"tokencache": "0"}},
        "vllm": "0.32.0",
        "model": "m",
        "seconds": 60,
    }


def test_a_counter_is_the_sum_of_its_label_sets():
    text = '# TYPE a_total counter\na_total{engine="0",m="x y"} 3.0\na_total{engine="1",m="x y"} 4.0\na_total_created 9\nb 5\n'
    assert counted(text, "a_total") == 7
    assert counted(text, "b") == 5
    with pytest.raises(ValueError, match="no c_total"):
        counted(text, "c_total")


def test_the_middle_of_the_calls_of_one_kind_and_their_spread():
    seen = points({"calls": [record(ttft=ttft, hits=hits) for ttft, hits in ((90.0, 1000), (300.0, 1500), (100.0, 500))]})
    assert len(seen) == 1
    assert (seen[0].ttft_ms, seen[0].least, seen[0].most, seen[0].n) == (100.0, 90.0, 300.0, 3)
    assert seen[0].hit_rate == 0.5
    assert seen[0].computed == 1000


def test_calls_between_marks_are_in_no_table():
    assert points({"calls": [record(kind="grow")]}) == []


def test_a_proxied_row_gives_its_speedup_over_the_direct_one_of_its_mark(found):
    found["calls"].append(record("direct", "loop", 8000, 1000.0))
    found["calls"].append(record("proxy", "loop", 8000, 250.0, hits=1990))
    shown = first_tokens(found, "loop", drift=True)
    cells = [dict(zip(shown.head, row, strict=True)) for row in shown.rows]
    assert [cell["times faster"] for cell in cells] == ["", "3.0", "", "3.0", "", "4.0"]
    assert cells[-1]["found cached"] == "99.5 %"
    assert cells[-1]["computed"] == "10"


def test_what_ids_save_and_what_a_prefix_saves(found):
    shown = bodies(found["bodies"])
    assert dict(zip(shown.head, shown.rows[0], strict=True)) == {
        "prompt": "1,990",
        "messages": "14",
        "messages ms": "21.0 (20.0)",
        "ids ms": "9.0 (8.0)",
        "prefix ms": "7.4 (7.0)",
        "saved by ids": "11.0",
        "saved by prefix": "2.0",
    }


def test_the_page_has_a_place_for_every_table_of_a_full_run(found):
    cases = {(case.play, bool(case.drift)) for case in FULL.cases}
    assert cases == {("agent", True), ("agent", False), ("chat", True), ("chat", False)}
    assert len(tables(found)) == 7
    text = filled((DOCS / "gain.md").read_text(), parts(found))
    # not those of `bench.gain_load` and of an earlier run on a GPU
    others = re.sub(r"<!-- (load|gpu) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    assert others.count("| direct |") == 12
    assert filled(text, parts(found)) == text


@pytest.mark.whole
def test_the_picture_of_a_run_is_the_same_file_each_time(found, tmp_path):
    for name in ("one", "two"):
        draw_gain(points(found), gain_report.WORDS, tmp_path / name)
    assert (tmp_path / "one/gain.svg").read_bytes() == (tmp_path / "two/gain.svg").read_bytes()


def test_a_stream_becomes_the_message_that_a_harness_would_send_back():
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning": "let "},
        {"reasoning": "me"},
        {"content": "\n\n"},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "bash", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
    ]
    events = [{"choices": [{"delta": delta}]} for delta in deltas] + [{"choices": [], "usage": {"total_tokens": 9}}]
    stream = b": sign of life\n\n" + b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    message, usage = assembled(stream)
    calls = [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}]
    assert message == {"role": "assistant", "content": "", "reasoning": "let me", "tool_calls": calls}
    assert usage == {"total_tokens": 9}


class InstantRollout(Rollout):
    """A session whose calls are answered at once, with the reply that the request forces."""

    def call(self, kind, mark, new_tokens, sizes, *, calls):
        self.add_input(new_tokens)
        sampled_text = self.reply(sizes, calls=calls)
        thought, rest = sampled_text.removeprefix("<think>\n").split("\n</think>\n\n")
        message = {"role": "assistant", "content": "" if calls else rest, "reasoning_content": thought}
        if calls:
            call = json.loads(rest.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            message["tool_calls"] = [{"id": "c", "type": "function", "function": call}]
        self.sampled_text = sampled_text
        self.messages.append(message)
        tokenizer = self.target.engine.tokenizer
        self.tokens = len(tokenizer.encode(tokenizer.render(self.messages, [TOOL] if self.tools else None)))
        self.records.append({"kind": kind, "mark": mark, "tokens": self.tokens, "after": self.messages[-2]["role"]})


@pytest.fixture
def rollout_of():
    engine = Engine(process=None, model_dir=None, model="m", tokenizer=build_tokenizer())
    return lambda tools: InstantRollout(CallTarget("direct", engine), "a session", "seed", tools, 0.0)


def test_a_reply_is_written_as_the_template_writes_it(rollout_of):
    """Otherwise no reply would be without drift, and the figures of direct calls would be too bad."""
    tokenizer = build_tokenizer()
    for calls in (True, False):
        rollout = rollout_of(True)
        rollout.call("loop", 0, 20, LONG, calls=calls)
        rendered = tokenizer.render(rollout.messages, [TOOL], add_generation_prompt=False)
        assert rendered.endswith(f"<|im_start|>assistant\n{rollout.sampled_text}<|im_end|>\n")
        assert tokenizer.resample(rollout.sampled_text, random.Random(1), 0.0) == tokenizer.encode(rollout.sampled_text)


def test_an_agent_is_measured_in_its_loop_and_after_a_user_message(rollout_of):
    rollout = rollout_of(True)
    for _ in agent(rollout, [1000, 2000], 3):
        pass
    assert [(r["kind"], r["mark"], r["after"]) for r in rollout.records if r["kind"] != "grow"] == [
        (kind, mark, role) for mark in (1000, 2000) for kind, role in [*[("loop", "tool")] * 3, ("follow-up", "user")]
    ]
    for mark in (1000, 2000):
        at = next(r["tokens"] for r in rollout.records if (r["kind"], r["mark"]) == ("loop", mark))
        assert at == pytest.approx(mark, rel=0.35)


def test_a_chat_has_only_user_messages(rollout_of):
    rollout = rollout_of(False)
    for _ in chat(rollout, [500, 1000], 2):
        pass
    assert [r["kind"] for r in rollout.records] == ["grow", "chat", "chat"] * 2
    assert {r["after"] for r in rollout.records} == {"user"}

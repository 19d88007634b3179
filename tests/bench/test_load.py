"""The load generator: what it counts, tested with the mock engine on a real socket."""

import asyncio

import pytest

from bench import client
from bench.load import Answer, Connection, Generator, Spec, summary
from bench.loads import Row, chosen
from bench.mock import Server, reply_of
from bench.talk import SMALL, Shape
from bench.targets import Target

MS = 1_000_000


@pytest.fixture
async def port():
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


def answer(ended_ms, status=200, error=""):
    return Answer(status, ended_ms * MS, 0, 0, b"1", error)


def test_open_loop_counts_from_when_a_call_was_due():
    """Three calls due at 10, 20 and 30 ms, all delayed until 100 ms: they waited 90, 80 and 70 ms, whenever they were sent."""
    found = summary([(10 * MS, answer(100)), (20 * MS, answer(100)), (30 * MS, answer(100))], 0, 50 * MS, open_loop=True)
    assert found["latency_us"][0] == 70_000
    assert found["latency_us"][100] == 90_000
    assert found["calls"] == 3
    assert found["calls_per_s"] == 0  # none was answered in the measured time


def test_closed_loop_counts_what_was_answered_in_the_measured_time():
    calls = [(0, answer(5)), (0, answer(20)), (15 * MS, answer(30)), (30 * MS, answer(70))]
    found = summary(calls, 10 * MS, 60 * MS, open_loop=False)
    assert (found["calls"], found["calls_per_s"]) == (2, 40.0)


def test_errors_are_counted_and_reported_without_a_latency():
    found = summary([(0, answer(20)), (0, answer(30, 500, "broken")), (0, answer(30, 500, "broken"))], 0, 50 * MS, open_loop=False)
    assert (found["calls"], found["errors"]) == (1, 2)
    assert found["error_words"] == [("500: broken", 2)]
    assert found["latency_us"][100] == 20_000


async def test_rollouts_send_back_the_replies(port):
    spec = Spec(ports=[port], sessions=True, connections=3, once=True, turns=4, seconds=20.0, shape=SMALL)
    bounds = []
    found = await Generator(spec).run(lambda: bounds.append(None))
    assert (found["calls"], found["errors"], found["late"]) == (12, 0, 0)
    assert len(found["sessions"]) == 5
    assert len(bounds) == 2


async def test_streams_report_their_pauses_and_lag(port):
    shape = Shape(tokens=5, chunks=5, pace_ms=20)
    spec = Spec(ports=[port], sessions=False, connections=2, once=True, turns=1, seconds=20.0, shape=shape, warm_turn=True)
    found = await Generator(spec).run(lambda: None)
    assert (found["calls"], found["errors"]) == (2, 0)
    assert found["latency_us"][0] >= 100_000 > found["pause_us"][100] > 0
    assert found["lag_us"][0] >= 0


async def test_open_loop_calls_start_without_waiting_for_others(port):
    found = await Generator(Spec(ports=[port], sessions=False, rate=200.0, seconds=0.5)).run(lambda: None)
    assert found["errors"] == 0
    assert found["calls"] > 0


async def test_a_closed_port_is_an_error_not_a_crash(unused_port):
    found = await Generator(Spec(ports=[unused_port], sessions=False, connections=1, once=True, turns=2, seconds=5.0)).run(lambda: None)
    assert (found["calls"], found["errors"]) == (0, 2)
    assert "no connection" in found["error_words"][0][0]


@pytest.fixture
async def unused_port():
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def test_a_connection_reads_the_whole_answer(port):
    connection = await Connection.open(port)
    body = b'{"messages":[{"role":"user","content":"hi"}],"model":"mock","mock_tokens":4}'
    heard = await connection.call(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body), body)
    connection.transport.close()
    assert (heard.status, heard.error) == (200, "")
    assert len(heard.number) == 8
    assert reply_of(4).json_text == b"w000w001w002"


class Able(Target):
    """A target without processes that may open any number of files."""

    def streams_possible(self):
        return 1 << 20


@pytest.mark.parametrize(
    ("shape", "connections", "left_out"),
    [
        ("141 KB", 64, set()),
        ("141 KB", 1, {"proxy memory x2"}),
        ("1 KB", 1024, {"litellm", "floor local"}),
        ("141 KB", 1024, {"litellm", "floor local", "proxy memory x2"}),
        ("141 KB, 500 chunks of 10 ms", 64, {"litellm", "floor local", "proxy memory x2"}),
        ("1 MB", 16, {"litellm"}),
    ],
)
def test_a_row_omits_what_another_row_measures(shape, connections, left_out):
    targets = {name: Able(name, ()) for name in ("direct", "relay", "floor", "floor local", "litellm", "proxy memory")}
    targets["proxy memory x2"] = Able("proxy memory x2", (), workers=2)
    assert targets.keys() - chosen(targets, Row(shape, connections, 1.0, 1)).keys() == left_out


def test_only_targets_with_sessions_get_the_long_window():
    row = Row("141 KB", 1024, 20.0, 1)
    assert row.spec().seconds - row.spec(fast=True).seconds == 16.0
    assert Row("141 KB", 64, 2.5, 3).spec(fast=True) == Row("141 KB", 64, 2.5, 3).spec()


@pytest.mark.parametrize("kinds", [[], ["root"], ["root", "branch"], ["root", "continue", "branch"]])
def test_sessions_whose_calls_did_not_all_continue_yield_no_figure(monkeypatch, kinds):
    known = {1: [], 2: [{"match": kind} for kind in kinds]}
    monkeypatch.setattr(client, "turns", lambda port, _session: known[port])
    with pytest.raises(RuntimeError, match=f"has {len(kinds)} of 2 turns"):
        client.check_continued([1, 2], "s", 2)
    known[1] = [{"match": "root"}, {"match": "continue"}]
    assert client.check_continued([1, 2], "s", 2) == 2

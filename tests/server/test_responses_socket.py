"""Responses over WebSocket: the same calls, limits and errors as over HTTP, and what only a connection knows."""

import contextlib
import json
from itertools import groupby
from socket import SHUT_RDWR

import pytest
from aiohttp import WSCloseCode, WSMsgType, WSServerHandshakeError

from tests.proxy.kit import EPISODES, HEADER, TOOLS, proxied
from tests.proxy.test_client_gone import settled
from tests.server.test_stopping import Rack
from tests.support.waiting import PATIENCE, until
from tokencache.errors import MemoryFullError
from tokencache.request_memory import Holding, Owner
from tokencache.server import responses_socket
from tokencache.testing import Fault, SimulatedEngine

ROUTE = "/v1/responses"
FUNCTIONS = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
CREATE = {"type": "response.create", "model": "sim", "tools": FUNCTIONS, "store": False}  # as Codex
START = {"role": "user", "content": "EPISODE:demo"}
ENDS = {"response.completed", "response.incomplete", "response.failed"}


class Socket:
    """A client's connection."""

    def __init__(self, socket):
        self.socket = socket

    async def send(self, **members):
        await self.socket.send_str(json.dumps({**CREATE, **members}))

    async def next(self):
        message = await self.socket.receive(PATIENCE)
        assert message.type is WSMsgType.TEXT, message
        return json.loads(message.data)

    async def events(self):
        """The events up to the end of a response, or to an error with a status."""
        events = [await self.next()]
        while events[-1]["type"] not in ENDS and "status" not in events[-1]:
            events.append(await self.next())
        return events

    async def ask(self, **members):
        await self.send(**members)
        return (await self.events())[-1]

    async def response(self, **members):
        event = await self.ask(**members)
        assert event["type"] == "response.completed", event
        return event["response"]

    async def closed(self):
        """How the server has closed it."""
        while (message := await self.socket.receive(PATIENCE)).type is WSMsgType.TEXT:
            pass
        return message.data if message.type is WSMsgType.CLOSE else None


@contextlib.asynccontextmanager
async def connected(rig, session="s", **more):
    async with rig.http.ws_connect(rig.url + ROUTE, headers={HEADER: session}, **more) as socket:
        yield Socket(socket)


def results(response):
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    found = [{"type": "function_call_output", "call_id": item["call_id"], "output": "a.txt\n"} for item in calls]
    return found or [{"role": "user", "content": "go on"}]


def kind_of(event):
    return event["type"]


def text_of(events):
    return "".join(event.get("delta", "") for event in events)


async def matches(rig):
    return [turn["match"] for turn in await rig.turns()]


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made
        await until(lambda: not made.proxy.request_memory.total, "nothing is held")


async def test_the_messages_are_the_events_of_the_stream(rig):
    async with connected(rig) as socket:
        await socket.send(input=[START])
        events = await socket.events()
    body = {**CREATE, "input": [START], "stream": True}
    async with rig.http.post(rig.url + ROUTE, json=body, headers={HEADER: "other"}) as answer:
        streamed = [json.loads(line.removeprefix("data: ")) for line in (await answer.text()).splitlines() if line.startswith("data: ")]
    assert [kind for kind, _ in groupby(events, kind_of)] == [kind for kind, _ in groupby(streamed, kind_of)]
    assert text_of(events) == text_of(streamed)
    assert events[-1]["response"].keys() == streamed[-1]["response"].keys()
    (turn,) = await rig.turns()
    assert (turn["dialect"], turn["match"]) == ("responses", "root")


@pytest.mark.parametrize("whole", [False, True], ids=["only what is new", "the whole history"])
async def test_each_request_extends_the_last_one(rig, whole):
    items, previous = [START], None
    async with connected(rig) as socket:
        for turn in range(4):
            response = await socket.response(input=items, **({"previous_response_id": previous} if turn and not whole else {}))
            assert response["usage"]["input_tokens"] == len(rig.ground_truth()[-1].prompt_ids)
            items = [*(items + response["output"] if whole else []), *results(response)]
            previous = response["id"]
    assert await matches(rig) == ["root", "continue", "continue", "continue"]
    assert (await rig.check())["complete"]


async def test_a_warm_up_samples_nothing_and_is_continued(rig):
    async with connected(rig) as socket:
        warm = await socket.response(input=[START], generate=False)
        assert (warm["output"], rig.ground_truth()) == ([], [])
        first = await socket.response(input=[], previous_response_id=warm["id"])
        await socket.response(input=results(first), previous_response_id=first["id"])
    assert await matches(rig) == ["root", "continue"]
    await rig.check()


async def test_the_messages_of_a_lane_name_it_and_each_lane_continues_its_own_response(rig):
    """OpenAI's beta: events repeat the `stream_id` of their request. A lane may fork from a response of another one."""
    async with connected(rig) as socket:
        last, tasks = {}, {"a": START, 'b "': {"role": "user", "content": "EPISODE:talk"}}
        for _ in range(2):
            for lane, item in tasks.items():
                more = {"previous_response_id": last[lane]["id"]} if lane in last else {}
                await socket.send(input=results(last[lane]) if lane in last else [item], stream_id=lane, **more)
                events = await socket.events()
                assert {event["stream_id"] for event in events} == {lane}
                last[lane] = events[-1]["response"]
        await socket.send(input=results(last["a"]), previous_response_id=last["a"]["id"], stream_id="c")
        assert [(event["type"], event["stream_id"]) for event in await socket.events()][-1] == ("response.completed", "c")
        refused = await socket.ask(input=7, stream_id="a")
        assert (refused["type"], refused["status"], refused["stream_id"]) == ("error", 400, "a")
        assert "stream_id" not in await socket.ask(input=[START])
    assert await matches(rig) == ["root", "root", "continue", "continue", "continue", "root"]
    await rig.check()


async def test_lanes_take_no_memory_without_limit(rig):
    """Each event repeats the name of a lane, and each lane keeps its last response: names have a limit, and so has their number."""
    asked = {"input": [START], "generate": False, "store": False}
    async with connected(rig) as socket:
        refused = await socket.ask(**asked, stream_id="x" * (responses_socket.LONGEST_LANE + 1))
        assert (refused["type"], refused["status"], refused["error"]["param"]) == ("error", 400, "stream_id")
        made = [
            await socket.response(**asked, stream_id=f"{lane:{responses_socket.LONGEST_LANE}}")
            for lane in range(responses_socket.MOST_LANES + 1)
        ]
        for lane, kind in ((0, "error"), (1, "response.completed")):
            again = await socket.ask(input=[], previous_response_id=made[lane]["id"])
            assert again["type"] == kind, again


async def test_only_the_last_response_of_the_connection_is_known_without_being_stored(rig):
    async with connected(rig) as socket:
        first = await socket.response(input=[START])
        second = await socket.response(input=results(first), previous_response_id=first["id"])
        unknown = await socket.ask(input=results(first), previous_response_id=first["id"])
        assert (unknown["type"], unknown["status"], unknown["error"]["code"]) == ("error", 400, "previous_response_not_found")
        assert await socket.response(input=results(second), previous_response_id=second["id"])
    async with connected(rig) as socket:
        assert (await socket.ask(input=[START], previous_response_id=second["id"]))["error"]["code"] == "previous_response_not_found"
        stored = await socket.response(input="EPISODE:demo", store=True)
    async with connected(rig) as socket:
        again = await socket.response(input=results(stored), previous_response_id=stored["id"], store=True)
        await socket.response(input=results(again), previous_response_id=again["id"], store=True)
    assert (await matches(rig))[-2:] == ["continue", "continue"]
    await rig.check()


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        ("{", 400, "JSON"),
        ('{"type": "response.append"}', 400, "'response.append' is not supported"),
        ("{}", 400, "'' is not supported"),
        (json.dumps({**CREATE, "input": 7}), 400, "input"),
        (json.dumps({**CREATE, "input": [START], "conversation": "c"}), 400, "conversation"),
        (json.dumps(CREATE)[:-1] + ', "model": "x"}', 400, "model"),
    ],
)
async def test_an_error_is_a_message_and_the_connection_goes_on(rig, sent, status, words):
    async with connected(rig) as socket:
        await socket.response(input=[START])
        await socket.socket.send_str(sent)
        (error,) = await socket.events()
        assert (error["type"], error["status"]) == ("error", status)
        assert words in error["error"]["message"]
        rig.engine.faults.append(Fault.answer(429, '{"error": {"message": "later"}}'))
        assert (await socket.ask(input=[START]))["status"] == 429
        await socket.socket.send_str('{"type": "response.processed", "response_id": "x"}')
        await socket.response(input=[START])
    exported = await rig.check()
    assert [(one["kind"], one["status"]) for one in exported["incidents"]] == [("call-refused", status), ("engine-refused", 429)]


async def test_requests_are_served_one_after_the_other(rig):
    async with connected(rig) as socket:
        for _ in range(3):
            await socket.send(input=[START])
        ended = [(await socket.events())[-1] for _ in range(3)]
    assert [event["type"] for event in ended] == ["response.completed"] * 3
    assert len({event["response"]["id"] for event in ended}) == 3


@pytest.mark.parametrize("header", ["x-stainless-retry-count", "Idempotency-Key"])
async def test_a_repeated_handshake_repeats_no_request(rig, header):
    async with rig.http.ws_connect(rig.url + ROUTE, headers={HEADER: "s", header: "1"}) as raw:
        first, second = [await Socket(raw).response(input=[START]) for _ in range(2)]
    assert first["id"] != second["id"]
    assert len(rig.ground_truth()) == 2


async def test_a_client_that_leaves_ends_its_waiting_requests():
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002)) as rig:
        async with connected(rig) as socket:
            await socket.send(input=[START])
            await socket.send(input=[{"role": "user", "content": "EPISODE:talk"}])
            while (await socket.next())["type"] != "response.reasoning_text.delta":
                pass
        await settled(rig)
        assert [turn["marks"] for turn in await rig.turns()] == [["aborted"]]
        await until(lambda: not rig.proxy.request_memory.total)


async def test_a_binary_message_closes_the_connection_with_the_reason():
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        async with connected(rig) as socket:
            await socket.socket.send_bytes(b"{}")
            assert await socket.closed() == WSCloseCode.UNSUPPORTED_DATA
        assert rig.ground_truth() == []
        await until(lambda: not rig.proxy.request_memory.total)


@pytest.mark.parametrize("how", ["closes", "is cut off"])
async def test_a_client_that_leaves_ends_its_call(how):
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002)) as rig:
        async with connected(rig) as socket:
            await socket.send(input=[START])
            while (await socket.next())["type"] != "response.reasoning_text.delta":
                pass
            if how == "is cut off":
                socket.socket.get_extra_info("socket").shutdown(SHUT_RDWR)
        await settled(rig)
        assert [turn["marks"] for turn in await rig.turns()] == [["aborted"]]
        exported = await rig.check(aborted=1)
        assert ([incident["kind"] for incident in exported["incidents"]], exported["complete"]) == (["client-gone"], True)
        await until(lambda: not rig.proxy.request_memory.total)


async def test_a_server_that_stops_finishes_the_response_and_closes_the_connections():
    async with Rack() as rack, rack.http.ws_connect(ROUTE) as idle, rack.http.ws_connect(ROUTE) as busy:
        rack.engine.token_delay = 0.002
        client = Socket(busy)
        await client.send(input=[START])
        await client.next()
        rack.end()
        assert (await client.events())[-1]["type"] == "response.completed"
        assert [await Socket(each).closed() for each in (busy, idle)] == [WSCloseCode.GOING_AWAY] * 2
        await rack.ended()


async def test_a_connection_that_the_server_closes_gives_its_memory_back(rig):
    async with connected(rig) as socket:
        await socket.response(input=[START])
        rig.proxy.router.sockets.close()
        assert await socket.closed() == WSCloseCode.GOING_AWAY


async def test_messages_and_kept_items_count_as_memory():
    async with proxied(max_body=20_000, request_memory=60_000) as rig:
        async with connected(rig) as socket, connected(rig, "other") as other:
            first = await socket.response(input=[START, {"role": "user", "content": "x" * 9_000}])
            await until(lambda: 9_000 < rig.proxy.request_memory.total < 12_000, "its items are kept, and nothing else")
            more = [{"role": "user", "content": "x" * 12_000}]
            assert (await socket.ask(input=more, previous_response_id=first["id"]))["status"] == 413
            raw = other.socket._response.connection.transport
            raw.write(b"\x81\xfe\x4e\x00" + b"\0" * 10_000)  # the beginning of a message of 19,968 bytes
            await until(lambda: rig.proxy.request_memory.of(Owner("other")) == 10_004)
            rig.proxy.request_memory.most = rig.proxy.request_memory.total
            raw.write(b"\0" * 5_000)
            assert await other.closed() is None
            await until(lambda: rig.store.session("other"), "the client may not come back")
            info = await rig.info("other")
            assert (info["outcome"], [one["kind"] for one in info["incidents"]]) == ("engine", ["request-not-read"])
            rig.proxy.request_memory.most = 60_000
            await socket.response(input=results(first), previous_response_id=first["id"])
        await until(lambda: not rig.proxy.request_memory.total)


@pytest.mark.parametrize("tenant", ["", "acme"])
@pytest.mark.parametrize("first", [True, False])
async def test_a_message_that_does_not_fit_into_memory_is_noted(rig, monkeypatch, first, tenant):
    """Its own bytes, or those of the request that is made of it. After a response, what the connection holds is the tenant's."""
    async with rig.http.post(f"{rig.url}/tokencache/v1/sessions", json={"session": "s", "tenant": tenant}) as answer:
        assert answer.status == 201
    async with connected(rig) as socket:
        await socket.response(input=[START])
        take, taken = Holding.take, []

        def full(holding, what, size):
            if holding.owner == Owner():  # not what the connection holds
                if taken or first:
                    raise MemoryFullError("full")
                taken.append(size)
            take(holding, what, size)

        monkeypatch.setattr(Holding, "take", full)
        assert (await socket.ask(input=[START]))["status"] == 503
        monkeypatch.undo()
        info = await rig.info()
        assert (info["outcome"], [one["kind"] for one in info["incidents"]]) == ("engine", ["request-not-read"])
        await socket.response(input=[START])
        assert (await rig.info())["outcome"] == "ok"


async def test_an_unknown_key_is_refused_before_the_connection_opens():
    async with proxied(registered_only=True) as rig:
        with pytest.raises(WSServerHandshakeError) as refused:
            await rig.http.ws_connect(rig.url + ROUTE, headers={"Authorization": "Bearer tck-unknown"})
        assert refused.value.status == 401

"""Stored responses are found by id, and storage grows only with what is new."""

import json

import pytest
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList

from tests.dialects.responses.kit import Session, call, digests
from tests.dialects.responses.test_request import FUNCTION, USER
from tokencache.errors import HarnessError

REPLY = {"reasoning": "hm", "content": "Look:", "tool_calls": [call("f", '{"a": 1}')]}


def result(response, text="ok"):
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": item["call_id"], "output": text} for item in calls]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chain_is_the_conversation_sent_whole(stream):
    session, whole = Session(), [USER]
    response = await session.respond(REPLY, stream=stream, input="hi", instructions="one", tools=[FUNCTION])
    for turn in range(80):
        new = result(response, f"result {turn}")
        whole += [*response["output"], *new]
        before = session.trips
        response = await session.respond(REPLY, stream=stream, input=new, previous_response_id=response["id"], instructions="two")
        assert session.trips - before <= 7
        chained = session.chat_request
        direct = await Session().chat(input=whole, instructions="two")
        assert chained["messages"] == direct["messages"]
        assert response["previous_response_id"] is not None
    assert chained["messages"][0] == {"role": "system", "content": "two"}
    listed = await session.get(f"/{response['id']}/input_items", limit="100", order="asc")
    assert [item["type"] for item in listed["data"]][:5] == ["message", "reasoning", "message", "function_call", "function_call_output"]
    ResponseItemList.model_validate(listed)


@pytest.mark.parametrize("chained", [False, True])
async def test_storage_grows_with_what_is_new(chained):
    """Neither way of going on writes again what was written, nor more the longer the session is."""
    session, items, costs, response = Session(), [USER], [], None
    for turn in range(100):
        before = session.written
        if chained and response is not None:
            response = await session.respond(REPLY, input=items[-1:], previous_response_id=response["id"])
        else:
            response = await session.respond(REPLY, input=items)
        costs.append(session.written - before)
        items += [*response["output"], *result(response, f"{turn:03d} " + "x" * 500)]
    assert max(costs) < 8000
    assert sum(costs[60:90]) < 1.5 * sum(costs[10:40])
    listed = await session.get(f"/{response['id']}/input_items")
    assert listed["data"][0]["output"].startswith("098")
    follow = await session.spoken(input="go on", previous_response_id=response["id"])
    assert digests(json.loads(follow.body)["messages"][:-1]) == digests((await Session().chat(input=items[:-1]))["messages"])


async def test_an_edited_history_is_stored_whole():
    session = Session()
    first = await session.respond(REPLY, input=[USER])
    edited = [{"role": "user", "content": "edited"}, *first["output"], *result(first)]
    second = await session.respond(REPLY, input=edited)
    follow = json.loads((await session.spoken(input=[], previous_response_id=second["id"])).body)
    assert follow["messages"][0]["content"] == "edited"
    assert [message["role"] for message in follow["messages"]] == ["user", "assistant", "tool", "assistant"]


async def test_branches_share_documents():
    session = Session()
    first = await session.respond(REPLY, input="hi")
    left = await session.respond({"content": "left"}, input=result(first, "L"), previous_response_id=first["id"])
    right = await session.respond({"content": "right"}, input=result(first, "R"), previous_response_id=first["id"])
    for response, text, said in ((left, "L", "left"), (right, "R", "right")):
        messages = (await session.chat(input="?", previous_response_id=response["id"]))["messages"]
        assert [message.get("content") for message in messages] == ["hi", "Look:", text, said, "?"]


@pytest.mark.parametrize("stream", [False, True])
async def test_reading_and_deleting_a_response(stream):
    session = Session()
    made = await session.respond(REPLY, stream=stream, input="hi", instructions="S \ud800", tools=[FUNCTION], metadata={"a": "b"})
    got = await session.get(f"/{made['id']}")
    assert got == made
    Response.model_validate(got)
    later = await session.respond({"content": "x"}, input=result(made), previous_response_id=made["id"])
    assert await session.get(f"/{made['id']}", "DELETE") == {"id": made["id"], "object": "response", "deleted": True}
    for path, method in (
        (f"/{made['id']}", "GET"),
        (f"/{made['id']}", "DELETE"),
        (f"/{made['id']}/input_items", "GET"),
        ("/resp_x", "GET"),
    ):
        with pytest.raises(HarnessError) as gone:
            await session.get(path, method)
        assert gone.value.status == 404
    with pytest.raises(HarnessError) as gone:
        await session.spoken(input="x", previous_response_id=made["id"])
    assert (gone.value.status, gone.value.kind) == (400, "previous_response_not_found")
    assert len((await session.chat(input="x", previous_response_id=later["id"]))["messages"]) == 5


async def test_nothing_is_stored_without_store():
    session = Session()
    made = await session.respond(REPLY, input="hi", store=False)
    assert session.kept == {}
    assert session.trips == 0
    assert made["store"] is False


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {"type": None}, {}])
async def test_references_become_the_items(kind):
    session = Session()
    made = await session.respond(REPLY, input=[USER])
    references = [{**kind, "id": item["id"]} for item in made["output"]]
    items = [USER, *references, *result(made)]
    expected = (await session.chat(input=[USER, *made["output"], *result(made)]))["messages"]
    second = await session.respond({"content": "x"}, input=items)
    assert session.chat_request["messages"] == expected
    assert (await session.chat(input=[], previous_response_id=second["id"]))["messages"][:-1] == expected


async def test_pages_of_input_items():
    session = Session()
    inputs = [{"role": "user", "content": f"{i}"} for i in range(45)]
    made = await session.respond({"content": "x"}, input=inputs)
    seen, query = [], {}
    for _ in range(5):
        page = await session.get(f"/{made['id']}/input_items", **query)
        seen += [item["content"][0]["text"] for item in page["data"]]
        query = {"after": page["last_id"]}
        if not page["has_more"]:
            break
    assert seen == [f"{i}" for i in reversed(range(45))]
    for query in ({"limit": "0"}, {"limit": "x"}, {"limit": "101"}, {"order": "up"}, {"after": "nobody"}, {"limit": "9" * 5000}):
        with pytest.raises(HarnessError):
            await session.get(f"/{made['id']}/input_items", **query)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/resp_1/cancel", 400),
        ("GET", "", 405),
        ("PUT", "/resp_1", 405),
        ("POST", "/compact", 405),
        ("GET", "/resp_1/x/y", 404),
        ("GET", "/", 404),
        ("GET", "/resp_1/input_items", 404),
    ],
)
async def test_other_routes(method, path, status):
    with pytest.raises(HarnessError) as refused:
        await Session().ask(path=path, method=method)
    assert refused.value.status == status


async def test_compaction_is_refused_with_what_to_do():
    with pytest.raises(HarnessError, match="let the client summarize them"):
        await Session().ask(path="/compact", method="POST")


async def test_events_are_not_stored():
    with pytest.raises(HarnessError) as refused:
        await Session().get("/resp_1", stream="true")
    assert refused.value.param == "stream"

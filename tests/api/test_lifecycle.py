"""The life of a session over HTTP: created, finished, sealed, labelled, rewarded, listed; and what is refused."""

import asyncio
import base64
import json

import pytest

from tests.proxy.kit import CHAT, HEADER, proxied, user
from tests.support.waiting import until
from tokencache.store.memory import MemoryStore
from tokencache.testing import Fault

API = "/tokencache/v1"
SESSIONS = f"{API}/sessions"


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made


async def call(rig, method, path, body=None):
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    async with rig.http.request(method, rig.url + path, data=data) as answer:
        return answer.status, await answer.json()


async def refused(rig, method, path, body=None):
    """The status, type and message of an error."""
    status, found = await call(rig, method, path, body)
    return status, found["error"]["type"], found["error"]["message"]


async def say(rig, session="s"):
    return await rig.post(session, messages=[user("EPISODE:talk")])


class DeletesWhileRead(MemoryStore):
    """A store whose sessions are deleted by somebody else after their state was read."""

    async def session(self, session):
        info = await super().session(session)
        await self.delete(session)
        return info


@pytest.mark.parametrize("route", ["trajectories", "drift", "turns", "outline"])
async def test_a_session_that_is_deleted_while_it_is_read_is_not_exported_as_empty(rig, route):
    await say(rig)
    rig.store.__class__ = DeletesWhileRead
    assert await refused(rig, "GET", f"{SESSIONS}/s/{route}") == (404, "not_found_error", "there is no session 's'")


async def test_a_call_of_a_proxy_that_died_does_not_keep_a_session_from_being_sealed(rig, monkeypatch):
    monkeypatch.setattr("tokencache.proxy.dedup.lost_calls.HEARTBEAT_SECONDS", 0.05)
    await rig.store.begin("s", "c", [], replica="died")
    await call(rig, "POST", f"{SESSIONS}/s/finish")
    assert (await refused(rig, "POST", f"{SESSIONS}/s/seal"))[:2] == (409, "calls_in_flight")

    async def sealed():
        status, found = await call(rig, "POST", f"{SESSIONS}/s/seal")
        return status == 200 and found

    found = await until(sealed)
    assert (found["complete"], [incident["kind"] for incident in found["incidents"]]) == (False, ["replica-lost"])


async def test_a_call_of_a_proxy_that_died_ends_in_a_session_that_is_sealed_by_force(rig, monkeypatch):
    """Who waits for the end of its calls gets it, and an export may delete it."""
    for module in ("proxy.dedup.lost_calls", "proxy.finishing", "api.lifecycle"):
        monkeypatch.setattr(f"tokencache.{module}.HEARTBEAT_SECONDS", 0.01)
    await rig.store.begin("s", "c", [], replica="died")
    status, found = await call(rig, "POST", f"{SESSIONS}/s/seal?force=true")
    assert (status, len(found["open_calls"])) == (200, 1)

    async def ended():
        return not (await rig.info())["open_calls"]

    await until(ended)
    assert [one["kind"] for one in (await rig.info())["incidents"]] == ["sealed-early", "replica-lost"]


class LosesTurns(MemoryStore):
    """A store that has lost the newest turn of each session, or its tokens."""

    async def turns(self, session):
        return (await super().turns(session))[:-1]


class LosesTokens(MemoryStore):
    """A store that has lost the tokens of the turns."""

    async def tokens(self, session, turns):
        raise KeyError(turns[0])


@pytest.mark.parametrize("store", [LosesTurns, LosesTokens])
async def test_a_session_with_lost_records_is_exported_as_torn(rig, store):
    await say(rig)
    rig.store.__class__ = store
    _, trajectory = await call(rig, "GET", f"{SESSIONS}/s/trajectories")
    assert not trajectory["complete"]
    assert [incident["kind"] for incident in trajectory["incidents"]] == ["torn-record"]


class InFlight:
    """A call that the engine does not answer, while the context is open."""

    def __init__(self, rig, session="s"):
        self.rig, self.session = rig, session

    async def __aenter__(self):
        self.rig.engine.faults.append(Fault.hang())
        self.task = asyncio.create_task(say(self.rig, self.session))

        async def begun():
            info = await self.rig.store.session(self.session)
            return info is not None and info.open_calls

        await until(begun)

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class TestStates:
    async def test_open_finished_sealed(self, rig):
        status, state = await call(rig, "POST", SESSIONS, {"session": "s", "group": "g"})
        assert (status, state["state"], state["turns"], state["group"], state["finished"]) == (201, "open", 0, "g", None)
        await say(rig)
        for _ in range(2):  # each step can be repeated
            status, state = await call(rig, "POST", f"{SESSIONS}/s/finish")
            assert (status, state["state"], state["sealed"], state["complete"]) == (200, "finished", False, True)
        for _ in range(2):
            status, state = await call(rig, "POST", f"{SESSIONS}/s/seal")
            assert (status, state["session"], state["state"], state["sealed"]) == (200, "s", "sealed", True)
        assert (await call(rig, "POST", f"{SESSIONS}/s/finish"))[1]["state"] == "sealed"  # no way back
        assert (state["model"], state["tokens"] > 0, state["incidents"]) == ("sim", True, [])

    async def test_a_session_without_a_name_gets_one(self, rig):
        names = {(await call(rig, "POST", SESSIONS, {}))[1]["session"] for _ in range(2)}
        assert len(names) == 2

    async def test_a_finished_session_accepts_no_new_call(self, rig):
        await say(rig)
        await call(rig, "POST", f"{SESSIONS}/s/finish")
        status, answer = await say(rig)
        assert (status, answer["error"]["type"]) == (409, "session_finished")
        assert [incident["kind"] for incident in (await rig.info("s"))["incidents"]] == ["late-call"]

    async def test_an_unfinished_session_is_not_sealed(self, rig):
        await say(rig)
        status, kind, message = await refused(rig, "POST", f"{SESSIONS}/s/seal")
        assert (status, kind, "finish" in message, "force=true" in message) == (409, "session_open", True, True)
        assert (await say(rig))[0] == 200

    async def test_a_call_in_flight_ends_before_the_session_is_sealed(self, rig):
        async with InFlight(rig):
            assert (await call(rig, "POST", f"{SESSIONS}/s/finish"))[0] == 200
            assert (await refused(rig, "POST", f"{SESSIONS}/s/seal"))[:2] == (409, "calls_in_flight")

    async def test_what_is_cut_by_force_is_marked_once(self, rig):
        async with InFlight(rig):
            for _ in range(2):
                status, state = await call(rig, "POST", f"{SESSIONS}/s/seal?force=true")
                assert (status, state["sealed"], state["complete"]) == (200, True, False)
                assert [one["kind"] for one in state["incidents"]] == ["sealed-early"]
                assert "not finished and 1 call was in flight" in state["incidents"][0]["detail"]

    async def test_forcing_marks_nothing_if_nothing_is_cut(self, rig):
        await say(rig)
        await call(rig, "POST", f"{SESSIONS}/s/finish")
        _, state = await call(rig, "POST", f"{SESSIONS}/s/seal?force=true")
        assert (state["complete"], state["incidents"]) == (True, [])

    @pytest.mark.parametrize(
        ("method", "path"),
        [("POST", "finish"), ("POST", "seal"), ("POST", "seal?force=true"), ("PUT", "reward"), ("GET", "reward"), ("PATCH", "")],
    )
    async def test_an_unknown_session(self, rig, method, path):
        body = {"reward": 1.0} if method == "PUT" else {} if method == "PATCH" else None
        assert (await refused(rig, method, f"{SESSIONS}/none/{path}".rstrip("/"), body))[0] == 404


class TestRewardsAndLabels:
    async def test_the_last_reward_counts_and_the_history_is_kept(self, rig):
        await say(rig)
        (turn,) = await rig.store.turns("s")
        await call(rig, "POST", f"{SESSIONS}/s/finish", {"reward": 0.5, "group": "g", "metadata": {"seed": 3}, "tags": ["a"]})
        await call(rig, "POST", f"{SESSIONS}/s/seal")
        second = {"reward": 1, "components": {"tests": 0.25}, "turns": {turn.id: -1.0}, "sequences": {turn.id: 2.0}}
        assert (await call(rig, "PUT", f"{SESSIONS}/s/reward", second))[0] == 200  # after sealing, too
        _, found = await call(rig, "GET", f"{SESSIONS}/s/reward")
        assert {name: found[name] for name in second} == second
        assert ([one["reward"] for one in found["history"]], found["count"]) == ([0.5], 2)
        _, trajectory = await call(rig, "GET", f"{SESSIONS}/s/trajectories")
        assert (trajectory["reward"], trajectory["reward_components"], trajectory["state"]) == (1.0, {"tests": 0.25}, "sealed")
        assert (trajectory["group"], trajectory["metadata"], trajectory["tags"]) == ("g", {"seed": 3}, ["a"])
        assert (trajectory["sequences"][0]["reward"], trajectory["sequences"][0]["turns"][0]["reward"]) == (2.0, -1.0)

    async def test_without_a_reward(self, rig):
        await say(rig)
        _, found = await call(rig, "GET", f"{SESSIONS}/s/reward")
        assert (found["reward"], found["history"], found["count"], found["components"]) == (None, [], 0, {})

    async def test_finishing_without_a_reward_keeps_the_one_before(self, rig):
        await say(rig)
        await call(rig, "PUT", f"{SESSIONS}/s/reward", {"reward": 0.5})
        assert (await call(rig, "POST", f"{SESSIONS}/s/finish", {"tags": ["a"]}))[1]["reward"] == 0.5

    @pytest.mark.parametrize(
        ("body", "names"),
        [
            (b'{"reward": NaN}', "malformed"),
            (b'{"reward": 1e999}', ""),
            ({"reward": 2e300}, "1e+300"),
            ({"reward": "1"}, "str"),
            ({"reward": 1.0, "components": {str(n): 0.0 for n in range(101)}}, "100"),
            ({"reward": 1.0, "turns": {"nope": 1.0}}, "no turn 'nope'"),
            ({"reward": 1.0, "sequences": {"nope": 1.0}}, "no sequence 'nope'"),
            ({"reward": 1.0, "rewrd": 2.0}, "'rewrd' (did you mean 'reward'?)"),
        ],
        ids=["nan", "infinite", "too large", "a string", "too many", "unknown turn", "unknown sequence", "unknown member"],
    )
    @pytest.mark.parametrize("route", ["PUT reward", "POST finish"])
    async def test_an_invalid_reward_changes_nothing(self, rig, route, body, names):
        await say(rig)
        method, path = route.split()
        status, _, message = await refused(rig, method, f"{SESSIONS}/s/{path}", body)
        assert (status, names in message) == (422, True), message
        _, state = await call(rig, "GET", f"{SESSIONS}/s")
        assert (state["reward"], state["state"]) == (None, "open")

    @pytest.mark.parametrize(
        "labels",
        [
            {"group": "x" * 201},
            {"group": "a\nb"},
            {"metadata": {"x": "y" * 16384}},
            {"metadata": [1]},
            {"tags": [" a"]},
            {"tags": ["a"] * 33},
            {"tag": "a"},
        ],
        ids=lambda labels: next(iter(labels)),
    )
    async def test_invalid_labels_are_refused(self, rig, labels):
        await say(rig)
        assert (await refused(rig, "PATCH", f"{SESSIONS}/s", labels))[0] == 422
        assert (await refused(rig, "POST", f"{SESSIONS}/s/finish", labels))[0] == 422
        assert (await refused(rig, "POST", SESSIONS, {"session": "new", **labels}))[0] in {400, 422}
        assert (await call(rig, "GET", f"{SESSIONS}/s"))[1]["state"] == "open"
        assert await rig.store.session("new") is None

    async def test_a_label_that_is_given_replaces_the_old_one_as_a_whole(self, rig):
        await call(rig, "POST", SESSIONS, {"session": "s", "group": "g", "metadata": {"a": 1, "b": 2}, "tags": ["x", "y"]})
        _, state = await call(rig, "PATCH", f"{SESSIONS}/s", {"metadata": {"c": 3}, "tags": []})
        assert (state["group"], state["metadata"], state["tags"]) == ("g", {"c": 3}, [])


class TestListing:
    async def fill(self, rig):
        for n in range(12):
            await call(
                rig,
                "POST",
                SESSIONS,
                {"session": f"s{n}", "group": f"g{n % 3}", "tags": ["even"] if n % 2 == 0 else [], "harness": "hermes" if n < 4 else ""},
            )
        for n in range(6):
            await call(rig, "POST", f"{SESSIONS}/s{n}/finish")
        await call(rig, "POST", f"{SESSIONS}/s0/seal")

    async def walk(self, rig, query=""):
        names, cursor = [], ""
        while True:
            _, page = await call(rig, "GET", f"{SESSIONS}?limit=5{query}{cursor and f'&cursor={cursor}'}")
            assert len(page["sessions"]) <= 5
            names += [state["session"] for state in page["sessions"]]
            cursor = page["cursor"]
            if cursor is None:
                return sorted(names)

    @pytest.mark.parametrize(
        ("query", "numbers"),
        [
            ("", range(12)),
            ("&state=sealed", [0]),
            ("&state=finished", range(1, 6)),
            ("&state=open", range(6, 12)),
            ("&group=g1", [1, 4, 7, 10]),
            ("&tag=even", range(0, 12, 2)),
            ("&harness=hermes", range(4)),
            ("&prefix=s1", [1, 10, 11]),
            ("&until=1", []),
            ("&since=1&tag=even&group=g0&state=finished", []),
            ("&since=1&tag=even&group=g1&state=finished", [4]),
        ],
    )
    async def test_every_session_that_matches_is_listed_once(self, rig, query, numbers):
        await self.fill(rig)
        wanted = sorted(f"s{n}" for n in numbers)
        assert await self.walk(rig, query) == wanted
        _, whole = await call(rig, "GET", f"{SESSIONS}?{query[1:]}")
        assert (sorted(state["session"] for state in whole["sessions"]), whole["cursor"]) == (wanted, None)

    async def test_a_cursor_of_another_store_is_refused(self, rig):
        await self.fill(rig)
        _, page = await call(rig, "GET", f"{SESSIONS}?limit=2")
        async with proxied(store=MemoryStore()) as other:
            status, kind, message = await refused(other, "GET", f"{SESSIONS}?limit=2&cursor={page['cursor']}")
            assert (status, kind, "another store" in message) == (422, "invalid_cursor", True)
        for damaged in ("!", "AAAA", base64.urlsafe_b64encode(b"x" * 30).decode()):
            assert (await refused(rig, "GET", f"{SESSIONS}?cursor={damaged}"))[:2] == (422, "invalid_cursor")

    @pytest.mark.parametrize("query", ["limit=x", "limit=1001", "state=done", "since=soon", "until=nan"])
    async def test_invalid_parameters_are_refused(self, rig, query):
        assert (await refused(rig, "GET", f"{SESSIONS}?{query}"))[0] == 400


async def test_finished_is_said_in_the_dialect_of_the_harness(rig):
    await say(rig)
    await call(rig, "POST", f"{SESSIONS}/s/finish")
    body = {"model": "sim", "messages": [user("hello")], "max_tokens": 5}
    async with rig.http.post(f"{rig.url}/v1/messages", json=body, headers={HEADER: "s"}) as answer:
        assert (answer.status, (await answer.json())["type"]) == (409, "error")
    async with rig.http.post(f"{rig.url}{CHAT}", json=body, headers={HEADER: "s"}) as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (409, "session_finished")

"""Figures of runs over HTTP, and the filters of lists: what a real harness did is what they say."""

import pytest

from tests.api.test_lifecycle import SESSIONS, call
from tests.proxy.kit import proxied, user
from tokencache import metrics
from tokencache.testing import Fault

V1 = "/tokencache/v1"


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made


async def play(rig, session, *, group="", tags=("run:r",), **finish):
    """One rollout of one call."""
    assert (await call(rig, "POST", SESSIONS, {"session": session, "group": group, "tags": list(tags)}))[0] == 201
    await rig.post(session, messages=[user("EPISODE:talk")])
    if finish:
        assert (await call(rig, "POST", f"{SESSIONS}/{session}/finish", finish))[0] == 200


async def run(rig):
    """Four rollouts of a run: passed, not passed, failed in the engine, and running; and one of no run."""
    await play(rig, "a", group="g", reward=1.0)
    await play(rig, "b", group="g", reward=0.25)
    rig.engine.faults.append(Fault.answer(500, "{}"))
    await play(rig, "c", group="g", reward=0.0)
    await play(rig, "d", group="h")
    await play(rig, "e", tags=("other",), reward=0.5)


async def test_the_figures_of_a_run(rig):
    await call(rig, "PUT", f"{V1}/weights", {"version": "7"})
    await run(rig)
    found = await rig.get(f"{V1}/runs/report?run=r")
    names = ("sessions", "rollouts", "valid", "failed", "failures", "running", "passed", "pass_rate")
    assert [found[name] for name in names] == [4, 4, 2, 1, {"engine": 1}, 1, 1, 0.5]
    assert (found["values"]["reward"]["mean"], found["values"]["reward"]["count"]) == (0.625, 2)
    exported = (await rig.exported("a"))["sequences"][0]
    assert found["values"]["length"]["most"] == len(exported["token_ids"])
    assert found["values"]["tokens"]["most"] == sum(exported["loss_mask"])
    (turn,) = await rig.turns("a")
    assert found["seconds"]["calls"]["most"] >= round(turn["seconds"], 3) > 0 or turn["seconds"] < 0.001
    assert [(one["version"], one["rollouts"]) for one in found["versions"]] == [("7", 2)]
    assert [(one["group"], [rollout["session"] for rollout in one["rollouts"]]) for one in found["groups"]] == [
        ("h", ["d"]),
        ("g", ["a", "b", "c"]),
    ]
    (failed,) = [one for one in found["groups"][1]["rollouts"] if one["stage"] == "failed"]
    assert (failed["session"], failed["failure"], "engine-refused" in failed["detail"]) == ("c", "engine", True)
    other = await rig.get(f"{V1}/runs/report?tag=other")
    assert (other["sessions"], other["values"]["reward"]["mean"]) == (1, 0.5)
    assert (await rig.get(f"{V1}/runs/report"))["sessions"] == 5
    assert (await rig.get(f"{V1}/runs/report?run=r&failed=true"))["values"]["reward"]["count"] == 3
    assert (await rig.get(f"{V1}/runs/report?run=r&passing=0.25"))["pass_rate"] == 1.0
    assert [(one["run"], one["valid"], one["failed"]) for one in (await rig.get(f"{V1}/runs"))["runs"]] == [("r", 2, 1)]


async def test_a_report_holds_what_was_finished_a_moment_ago(rig):
    """One that is asked for once is not taken from the listing that viewers share."""
    await play(rig, "a", reward=1.0)
    assert (await rig.get(f"{V1}/runs/report?run=r&recent=true"))["valid"] == 1
    await play(rig, "b", reward=1.0)
    assert (await rig.get(f"{V1}/runs/report?run=r"))["valid"] == 2


async def test_a_group_says_what_it_waits_for(rig):
    await play(rig, "a", group="g", reward=1.0)
    await play(rig, "b", group="g")
    await call(rig, "POST", f"{V1}/queue/take", {"consumer": "c", "group_size": 3})
    (group,) = (await rig.get(f"{V1}/runs/report?run=r"))["groups"]
    assert group["size"] == 3
    assert group["waits"].startswith("group g: 1 of 3 ready, waits for b since ")
    compared = await rig.get(f"{V1}/comparison?group=g")
    assert compared["waits"].startswith("group g: 1 of 3 ready, waits for b since ")


async def test_a_group_page_has_advantages_answers_and_failures(rig):
    await run(rig)
    await play(rig, "f", group="g", reward=-9.0, failed="sandbox")
    found = await rig.get(f"{V1}/comparison?group=g")
    members = {one["session"]: one for one in found["members"]}
    assert members["a"]["advantage"] == -members["b"]["advantage"] > 0
    assert (members["f"]["advantage"], members["f"]["outcome"]) == (None, "sandbox")
    assert "One, two, three" in members["a"]["answer"]
    assert [(one["session"], one["outcome"]) for one in found["not_compared"]] == [("c", "engine")]
    assert (found["values"]["reward"]["count"], found["values"]["reward"]["mean"]) == (2, 0.625)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("run=r&outcome=engine", ["c"]), ("outcome=ok&sort=session", ["a", "b", "d", "e"]), ("incident=engine-refused", ["c"]),
        ("reward=0.25", ["b"]), ("reward=>0.25&sort=session", ["a", "e"]), ("reward=>=0.25&sort=session", ["a", "b", "e"]),
        ("reward=<0.5&sort=session", ["b", "c"]), ("reward=0.25..0.5&sort=session", ["b", "e"]), ("reward=none", ["d"]),
        ("turns=0", ["c"]), ("turns=<=0", ["c"]), ("tokens=0", ["c"]), ("tokens=>0&run=r&sort=session", ["a", "b", "d"]),
        ("version=none", []), ("run=none", []), ("version=7&sort=session", ["a", "b", "d", "e"]),
    ],
)  # fmt: skip
async def test_sessions_are_filtered(rig, query, names):
    await call(rig, "PUT", f"{V1}/weights", {"version": "7"})
    await run(rig)
    assert [one["session"] for one in (await rig.get(f"{V1}/summaries?{query}"))["sessions"]] == names


async def test_sessions_are_listed_by_outcome(rig):
    await run(rig)
    found = await rig.get(f"{V1}/sessions?outcome=engine")
    assert [one["session"] for one in found["sessions"]] == ["c"]
    assert {one["session"] for one in (await rig.get(f"{V1}/sessions?outcome=ok&limit=100"))["sessions"]} == {"a", "b", "d", "e"}


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("summaries?reward=high", 400, "reward must be a number, a range such as `>0.5`"),
        ("summaries?reward=nan", 400, "reward must be"),
        ("summaries?turns=>1..3", 400, "turns must be"),
        ("summaries?tokens=1..", 400, "tokens must be"),
        ("summaries?incident=lost", 400, "incident 'lost' is not one of: "),
        ("summaries?outcome=Engine!", 400, "outcome must be one of ok, engine"),
        ("sessions?outcome=Engine!", 400, "outcome must be one of ok, engine"),
        ("summaries?rewards=1", 422, "did you mean 'reward'?"),
        ("runs/report?run=none", 404, "no session is in run 'none'"),
        ("runs/report?tag=none", 404, "no session has the tag 'none'"),
        ("runs/report?passing=high", 400, "passing must be a finite number"),
        ("runs/report?limit=1001", 400, "limit must be a number from 0 to 1000"),
        ("runs/report?failed=1", 400, "failed is true or false"),
    ],
)
async def test_what_cannot_be_asked_is_named(rig, path, status, words):
    async with rig.http.get(f"{rig.url}{V1}/{path}") as answer:
        assert answer.status == status
        assert words in await answer.text()


async def test_metrics_say_who_waits_and_how_full_the_store_is(rig):
    async def value(name, **labels):
        async with rig.http.get(f"{rig.url}/metrics") as answer:
            text = await answer.text()
        assert name in text
        return metrics.REGISTRY.get_sample_value(name, labels)

    calls = await value("tokencache_call_seconds_count")
    waited = await value("tokencache_waited_seconds_total", who="trainers") or 0.0
    await play(rig, "a", group="g", reward=1.0)
    await play(rig, "b", group="g")
    await call(rig, "POST", f"{V1}/queue/take", {"consumer": "c", "group_size": 3, "wait": 0.05})
    rig.proxy._gauges._state._expires = 0.0
    assert await value("tokencache_call_seconds_count") == calls + 2
    assert await value("tokencache_waited_seconds_total", who="trainers") >= waited + 0.05
    assert await value("tokencache_queue_sessions", state="ready") == 1
    assert await value("tokencache_queue_groups", state="short") == 1
    assert await value("tokencache_queue_oldest_seconds", state="short") > 0
    assert await value("tokencache_store_bytes") > 0
    assert str(await value("tokencache_store_used_ratio")) == "nan"

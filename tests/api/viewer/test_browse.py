"""The data of the viewer over HTTP equals that of an export, comes in bounded pieces, and needs the key."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from tests.api.viewer.scenes import ANSWERS, EPISODES, GROUP, crowd, group, lively, long
from tests.media import put
from tests.proxy.kit import EPISODES as TALKS
from tests.proxy.kit import TOOLS, echo, proxied, results, user
from tests.support.leading import lead_to
from tests.support.waiting import PATIENCE
from tokencache.api.openapi import OPERATIONS
from tokencache.api.summaries import SessionList
from tokencache.api.viewer.groups import GroupComparison
from tokencache.api.viewer.tokens import TokenTexts
from tokencache.core.incidents import IncidentKind
from tokencache.core.reasons import Reason
from tokencache.core.session import LabelChanges, Reward
from tokencache.core.turn import Tokens
from tokencache.store.base import Entry
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

V1 = "/tokencache/v1"
SESSION = f"{V1}/sessions/rollout-7"
ROOT = Path(__file__).parents[3]


@pytest.fixture
async def rig():
    async with proxied(SimulatedEngine(episodes={**EPISODES, **TALKS}, seed=3)) as made:
        yield made


async def whole(rig, session, sequence):
    """Put the windows of a sequence together, read in pieces of 97 tokens."""
    described = await rig.get(f"{V1}/sessions/{session}/sequences/{sequence}")
    response = {"ids": [], "logprobs": [], "texts": []}
    at = 0
    while at < described["tokens"]:
        window = await rig.get(f"{V1}/sessions/{session}/sequences/{sequence}/tokens?start={at}&end={at + 97}")
        assert window["start"] == at
        for name in response:
            response[name] += window[name]
        at = window["end"]
    return described, response


async def test_windows_equal_the_trajectory(rig):
    await lively(rig)
    exported = await rig.exported("rollout-7")
    kinds = set()
    for sequence in exported["sequences"]:
        described, response = await whole(rig, "rollout-7", sequence["id"])
        assert response["ids"] == sequence["token_ids"]
        assert [int(value is not None) for value in response["logprobs"]] == sequence["loss_mask"]
        assert [value or 0.0 for value in response["logprobs"]] == sequence["logprobs"]
        assert "".join(text or "" for text in response["texts"]) == rig.engine.tokenizer.decode(sequence["token_ids"])
        runs = described["runs"]
        assert [run["start"] for run in runs] == [0, *(run["end"] for run in runs[:-1])]
        assert runs[-1]["end"] == described["tokens"]
        for run in runs:
            kinds.add(run["kind"])
            assert set(sequence["loss_mask"][run["start"] : run["end"]]) == {int(run["kind"] == "sampled")}
        if sequence["start"] == "resplice":
            anchors = [(run["turn"], run["start"], run["end"]) for run in runs if run["kind"] == "anchor"]
            assert anchors == [(a["turn"], a["start"], a["end"]) for a in sequence["turns"][0]["anchors"]]
    assert kinds == {"prompt", "earlier", "anchor", "tail", "sampled"}


async def test_a_transcript_places_each_message_at_its_tokens(rig):
    """The text of each message is within its range of tokens, the ranges are in order, and replies are named with their turns."""
    await lively(rig)
    exported = await rig.exported("rollout-7")
    for sequence in exported["sequences"]:
        response = await rig.get(f"{SESSION}/sequences/{sequence['id']}/messages")
        window = response["window"]
        assert response["kept"]
        assert [message["at"] for message in window] == list(range(response["messages"]))
        assert response["starts"] == [message["tokens"][0] for message in window]
        assert response["starts"] == sorted(response["starts"])
        for message in window:
            start, end = message["tokens"]
            text = rig.engine.tokenizer.decode(sequence["token_ids"][start:end])
            for part in message["message"]["parts"]:
                if part["kind"] != "call":
                    assert part["text"].strip() in text, message
        replies = {message["turn"]: tuple(message["tokens"]) for message in window if message["turn"]}
        for turn in sequence["turns"]:
            assert replies[turn["turn"]] == tuple(turn["completion"])
            for anchor in turn.get("anchors", ()):
                assert replies[anchor["turn"]] == (anchor["start"], anchor["end"])


async def test_a_window_of_a_transcript(rig):
    await rig.say("s", [user("EPISODE:talk " + "x" * 9000)])
    (turn,) = await rig.store.turns("s")
    path = f"{V1}/sessions/s/sequences/{turn.id}/messages"
    both = (await rig.get(path))["window"]
    (alone,) = (await rig.get(f"{path}?start=0&end=1"))["window"]
    (cut,), (entire,) = both[0]["message"]["parts"], alone["message"]["parts"]
    assert (len(cut["text"]), cut["length"], cut["cut"]) == (4000, 9013, True)
    assert (len(entire["text"]), entire["length"], entire["cut"]) == (9013, 9013, False)
    assert (both[0]["asked"], both[1]["turn"]) == (turn.id, turn.id)
    async with rig.http.get(f"{rig.url}{path}?start=2&end=1") as answer:
        assert answer.status == 400


async def test_a_transcript_without_stored_requests_has_the_replies(rig):
    history = [user("EPISODE:talk")]
    said = await rig.say("s", history)
    await rig.say("s", [*history, echo(said), user("go on")])
    turns = await rig.store.turns("s")
    tokens = await rig.store.tokens("s", [turn.id for turn in turns])
    begun = await rig.store.begin("bare", "c", ())
    await rig.store.commit("bare", begun.epoch, "c", [Entry(turn, tokens[turn.id]) for turn in turns])
    response = await rig.get(f"{V1}/sessions/bare/sequences/{turns[0].id}/messages")
    assert not response["kept"]
    assert [message["turn"] for message in response["window"]] == [turn.id for turn in turns]


async def test_the_outline_has_the_rollouts_figures(rig):
    await lively(rig)
    outline, exported = await rig.get(f"{SESSION}/outline"), await rig.exported("rollout-7")
    assert outline["figures"] == {name: value for name, value in exported["figures"].items() if name != "drift"}
    assert outline["complete"] is exported["complete"] is False
    assert outline["incidents"] == exported["incidents"]
    for mine, theirs in zip(outline["sequences"], exported["sequences"], strict=True):
        assert {name: mine[name] for name in ("id", "start", "reason", "continued", "tools")} == {
            name: theirs[name] for name in ("id", "start", "reason", "continued", "tools")
        }
        assert mine["parent"] == (None if theirs["parent"] is None else [s["id"] for s in exported["sequences"]].index(theirs["parent"]))
        assert (mine["tokens"], mine["trainable_tokens"]) == (len(theirs["token_ids"]), sum(theirs["loss_mask"]))
    assert [turn["number"] for turn in outline["turns"] if turn["thrown_away"]] == [1]


async def test_a_sampled_reply_without_log_probabilities_is_unscored(rig):
    await rig.say("s", [user("EPISODE:talk")])
    store = rig.store
    (turn,) = await store.turns("s")
    tokens = (await store.tokens("s", [turn.id]))[turn.id]
    begun = await store.begin("bare", "c", ())
    bare = Tokens(tokens.delta, tokens.completion)
    await store.commit("bare", begun.epoch, "c", [Entry(msgspec.structs.replace(turn, marks=("no-logprobs",)), bare)])
    described, response = await whole(rig, "bare", turn.id)
    assert [run["kind"] for run in described["runs"]] == ["prompt", "unscored"]
    assert set(response["logprobs"]) == {None}
    outline = await rig.get(f"{V1}/sessions/bare/outline")
    assert outline["figures"] == {k: v for k, v in (await rig.exported("bare"))["figures"].items() if k != "drift"}


async def test_tokens_that_a_budget_forced_are_unscored(rig):
    rig.engine.replies.episodes = {"thinks": ["<think>\nOne two three four five.\n</think>\n\nDone."]}
    await rig.say("s", [user("EPISODE:thinks")], thinking_token_budget=3)
    (turn,) = await rig.store.turns("s")
    described, response = await whole(rig, "s", turn.id)
    assert [run["kind"] for run in described["runs"]] == ["prompt", "sampled", "unscored", "sampled"]
    assert response["logprobs"].count(None) == turn.prompt_tokens + 1
    outline = await rig.get(f"{V1}/sessions/s/outline")
    assert outline["figures"] == {k: v for k, v in (await rig.exported("s"))["figures"].items() if k != "drift"}
    assert outline["figures"]["untrainable_tokens"] == 1


async def test_torn_records_are_reported(rig):
    await rig.say("s", [user("EPISODE:talk")])
    (turn,) = await rig.store.turns("s")
    tokens = (await rig.store.tokens("s", [turn.id]))[turn.id]
    begun = await rig.store.begin("torn", "c", ())
    await rig.store.commit("torn", begun.epoch, "c", [Entry(msgspec.structs.replace(turn, prefix_hash=b"x" * 16), tokens)])
    async with rig.http.get(f"{rig.url}{V1}/sessions/torn/sequences/{turn.id}") as answer:
        assert answer.status == 409
        assert "torn" in (await answer.json())["error"]["message"]


async def test_a_session_that_lost_records_is_there_and_its_turns_are_shown(rig, monkeypatch):
    await rig.say("s", [user("EPISODE:talk")])
    (turn,) = await rig.store.turns("s")

    async def lost(_session, turns):
        raise KeyError(turns[0])

    monkeypatch.setattr(rig.store, "tokens", lost)
    shown = await rig.get(f"{V1}/sessions/s/turns/{turn.id}")
    assert (shown["torn"], shown["lost"]["unknown"]) == (f"KeyError: '{turn.id}'", "torn-record")
    for path in ("changes", f"sequences/{turn.id}"):
        async with rig.http.get(f"{rig.url}{V1}/sessions/s/{path}") as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (409, "torn_record")


async def test_a_recognized_rewriting_is_shown_next_to_what_was_served(rig):
    await lively(rig)
    turns = (await rig.get(f"{SESSION}/outline"))["turns"]
    response = await rig.get(f"{SESSION}/turns/{turns[2]['id']}")
    (one,) = response["echoes"]
    assert (one["turn"], one["verdict"], one["relied"]) == (turns[0]["id"], "rewritten", True)
    assert set(one["rules"]) == set(response["forgiven"])
    parts = dict(one["parts"])
    served, back = ("".join(segment[side] for segment in parts["call 1 arguments"]) for side in (1, 2))
    assert json.loads(served) == {"command": "cd /work/repo && python -m pytest -q tests/test_api.py", "timeout": "120"}
    assert json.loads(back) == {"command": "python -m pytest -q tests/test_api.py", "timeout": 120}
    assert ["differs", "cd /work/repo && ", ""] in parts["call 1 arguments"]
    respliced = next(turn for turn in turns if turn["match"] == "resplice")
    echoes = (await rig.get(f"{SESSION}/turns/{respliced['id']}"))["echoes"]
    assert [(one["turn"], one["relied"]) for one in echoes] == [(turns[n]["id"], True) for n in (0, 2, 3, 4)]


async def test_the_cause_of_a_split_is_shown(rig):
    """A reply that the harness invented is compared with the one served there. The reply after it keeps its tokens."""
    await lively(rig)
    turns = (await rig.get(f"{SESSION}/outline"))["turns"]
    split = [turn for turn in turns if turn["match"] == "resplice"][-1]
    first, second = (await rig.get(f"{SESSION}/turns/{split['id']}"))["echoes"]
    assert (first["turn"], first["verdict"], first["relied"], first["elsewhere"]) == (turns[5]["id"], "foreign", False, False)
    assert ["differs", "three", "2"] in dict(first["parts"])["content"]
    assert (second["turn"], second["relied"], second["elsewhere"]) == (turns[6]["id"], True, False)


async def test_sessions_are_listed_in_pages(rig):
    await crowd(rig.store, 250)
    await lively(rig)
    first = await rig.get(f"{V1}/summaries?limit=100")
    assert (first["total"], first["found"], len(first["sessions"])) == (251, 251, 100)
    assert first["sessions"][0]["session"] == "rollout-7"
    assert first["sessions"][0]["incidents"] == {"upstream-broke": 1}
    states = {
        "any": 251,
        "live": 25,
        "incomplete": 26,
        "complete": 225,
        "failed": 1,
        "incidents": 1,
        "open": 251,
        "finished": 0,
        "sealed": 0,
    }
    assert first["states"] == states
    last = await rig.get(f"{V1}/summaries?limit=100&offset=200")
    assert len(last["sessions"]) == 51
    named = await rig.get(f"{V1}/summaries?contains=CH-0004&state=live")
    assert [one["session"] for one in named["sessions"]] == ["batch-00040"]
    assert named["found"] == 1


async def test_sessions_are_filtered_and_sorted(rig):
    await group(rig)
    await lively(rig)

    async def names(query):
        return [one["session"] for one in (await rig.get(f"{V1}/summaries?{query}"))["sessions"]]

    assert await names("sort=reward") == ["math-17-c", "math-17-b", "math-17-a", "rollout-7", "math-17-none", "math-17-d"]
    assert await names("sort=-reward") == ["math-17-a", "math-17-b", "math-17-c", "rollout-7", "math-17-none", "math-17-d"]
    assert (await names("sort=-tokens"))[:2] == ["rollout-7", "math-17-c"]
    assert await names("group=math-17&sort=session") == [f"math-17-{n}" for n in ("a", "b", "c", "d", "none")]
    assert await names("tag=two%20words&state=finished") == ["math-17-a"]
    assert await names("tag=two") == []
    assert await names("harness=claude-code&contains=ROLL") == ["rollout-7"]
    assert len(await names("model=sim")) == 5
    (one,) = (await rig.get(f"{V1}/summaries?contains=math-17-a"))["sessions"]
    state = await rig.get(f"{V1}/sessions/math-17-a")
    assert {name: one[name] for name in ("state", "reward", "group", "tags", "harness", "model", "tokens")} == {
        "state": "finished", "reward": 1.0, "group": "math-17", "tags": ["math", "two words"], "harness": "claude-code", "model": "sim",
        "tokens": state["tokens"],
    }  # fmt: skip


async def test_a_group_is_compared(rig):
    await group(rig)
    found = await rig.get(f"{V1}/comparison?group=math-17")
    exported = {name: (await rig.exported(name))["sequences"][0] for name in ANSWERS}
    assert {one["session"]: (one["length"], one["trainable"]) for one in found["members"]} == {
        name: (len(one["token_ids"]), sum(one["loss_mask"])) for name, one in exported.items()
    }
    assert (found["found"], [one["session"] for one in found["not_compared"]]) == (5, ["math-17-none"])
    first = found["parting"]
    assert (first["at"], first["message"], first["role"], first["turn"], first["kind"]) == (found["shared"], 1, "assistant", 0, "sampled")
    ids = [one["token_ids"] for one in exported.values()]
    assert all(one[: first["at"]] == ids[0][: first["at"]] for one in ids)
    assert len({one[first["at"]] for one in ids}) == len(first["branches"]) == 2
    branches = {tuple(sorted(branch["sessions"])): branch for branch in first["branches"]}
    alone = branches["math-17-c",]
    assert (alone["parting"], alone["text"].startswith("Multiply")) == (None, True)
    second = branches["math-17-a", "math-17-b", "math-17-d"]["parting"]
    assert (second["message"], second["turn"]) == (3, 1)
    assert sorted((sorted(branch["sessions"]), branch["text"][0]) for branch in second["branches"]) == [
        (["math-17-a", "math-17-d"], "7"),
        (["math-17-b"], "8"),
    ]


async def test_a_compared_group_is_up_to_date(rig):
    """A session that gets a reward or a turn is compared with it, although sessions that were read are cached."""
    await group(rig)
    comparison = GroupComparison(rig.store, TokenTexts(rig.proxy.pool))

    async def compared():
        summaries = await SessionList(rig.proxy.ledger).group(GROUP)
        return {one["session"]: one for one in (await comparison.compare(summaries))["members"]}

    before = await compared()
    await rig.store.add_reward("math-17-d", Reward(0.25))
    await rig.say("math-17-none", [user("EPISODE:sum What is 3 + 4?")])
    after = await compared()
    assert (before["math-17-d"]["reward"], after["math-17-d"]["reward"]) == (None, 0.25)
    assert after.keys() - before.keys() == {"math-17-none"}
    assert after["math-17-a"] == before["math-17-a"]


async def test_a_group_without_an_engine_is_compared_by_ids(rig):
    await group(rig)
    await lead_to(rig.proxy.upstream, "http://127.0.0.1:9")
    parting = (await rig.get(f"{V1}/comparison?group=math-17"))["parting"]
    assert all(re.fullmatch(r"[\d ]+", text) for text in (parting["before"], *(branch["text"] for branch in parting["branches"])))


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        (f"{V1}/sessions/nobody/outline", 404, "no session 'nobody'"),
        (f"{SESSION}/turns/none", 404, "no turn 'none'"),
        (f"{SESSION}/sequences/none", 404, "no sequence 'none'"),
        (f"{SESSION}/sequences/none/tokens", 404, "no sequence 'none'"),
        (f"{SESSION}/sequences/none/messages", 404, "no sequence 'none'"),
        (f"{V1}/summaries?state=odd", 400, "not one of"),
        (f"{V1}/summaries?sort=odd", 400, "not one of"),
        (f"{V1}/comparison?group=none", 404, "no session is in group 'none'"),
        (f"{V1}/comparison", 404, "no session is in group"),
        (f"{V1}/summaries?limit=-1", 400, "limit must be a number"),
        (f"{V1}/summaries?limit=501", 400, "limit must be a number"),
        (f"{V1}/summaries?offset=%F0%9D%9F%99", 400, "offset must be a number"),
        (f"{SESSION}/texts?turn=none", 404, "no turn"),
    ],
)
async def test_bad_requests_have_clear_errors(rig, path, status, words):
    await rig.say("rollout-7", [user("EPISODE:talk")])
    async with rig.http.get(rig.url + path) as answer:
        assert answer.status == status
        assert words in (await answer.json())["error"]["message"]


async def test_a_window_is_bounded(rig):
    await long(rig.store, turns=60, tokens=12_000)
    (sequence,) = (await rig.get(f"{V1}/sessions/long/outline"))["sequences"]
    messages = f"{V1}/sessions/long/sequences/{sequence['id']}/messages"
    assert [len((await rig.get(f"{messages}?start={start}"))["window"]) for start in (0, 100, 200)] == [100, 20, 0]
    async with rig.http.get(f"{rig.url}{messages}?start=0&end=101") as answer:
        assert answer.status == 400
    path = f"{V1}/sessions/long/sequences/{sequence['id']}/tokens"
    assert len((await rig.get(f"{path}?start=100&end=4196"))["ids"]) == 4096
    assert (await rig.get(f"{path}?start=99999&end=99999"))["ids"] == []
    for query in ("start=0&end=4097", "start=10&end=5"):
        async with rig.http.get(f"{rig.url}{path}?{query}") as answer:
            assert answer.status == 400


async def test_ids_are_shown_without_an_engine(rig):
    await rig.say("s", [user("EPISODE:talk")])
    (sequence,) = (await rig.get(f"{V1}/sessions/s/outline"))["sequences"]
    await lead_to(rig.proxy.upstream, "http://127.0.0.1:9")
    window = await rig.get(f"{V1}/sessions/s/sequences/{sequence['id']}/tokens")
    assert window["texts"] is None
    assert "cannot be reached" in window["unread"]
    assert len(window["ids"]) == sequence["tokens"]


async def test_texts_of_ids_that_were_never_sent(rig):
    await rig.say("s", [user("EPISODE:talk")])
    (turn,) = await rig.turns()
    ids = rig.engine.tokenizer.encode("naïve 日本 ☕<|im_end|>🙂 <think>")
    response = await rig.get(f"{V1}/sessions/s/texts?turn={turn['turn']}&ids={','.join(map(str, ids))}")
    assert "".join(text or "" for text in response["texts"]) == "naïve 日本 ☕<|im_end|>🙂 <think>"
    assert "\ufffd" not in "".join(text or "" for text in response["texts"])
    assert None in response["texts"]
    for wrong in ("1,x", "-1", "99999999999"):
        async with rig.http.get(f"{rig.url}{V1}/sessions/s/texts?turn={turn['turn']}&ids={wrong}") as answer:
            assert answer.status == 400


async def test_new_turns_are_visible_at_once(rig):
    history = [user("EPISODE:demo")]
    said = await rig.say("s", history, tools=TOOLS)
    (sequence,) = (await rig.get(f"{V1}/sessions/s/outline"))["sequences"]
    before, _ = await whole(rig, "s", sequence["id"])
    await rig.say("s", [*history, echo(said), *results(said)], tools=TOOLS)
    after, response = await whole(rig, "s", sequence["id"])
    assert after["tokens"] > before["tokens"]
    assert response["ids"] == (await rig.exported())["sequences"][0]["token_ids"]


KEY = "the-trainers-own"


async def test_the_data_needs_the_key():
    """Every route under `/tokencache/` that can be read, with no key, a wrong one and the right one."""
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=3), admin_key=KEY) as rig:
        await lively(rig, "hidden-name")
        await rig.store.set_labels("hidden-name", LabelChanges(group="hidden-group"))
        (turn, *_) = await rig.store.turns("hidden-name")
        (sha256,) = await put(rig.store, "hidden-name", b"a failing test")
        known = {route.resource.canonical for route in rig.proxy.application().router.routes() if route.method == "GET"}
        paths = {path for path in known if path.startswith("/tokencache/")}
        assert {f"{V1}/summaries", "/tokencache/ui/", "/tokencache/ui/main.js"} <= paths
        grouped = {one.path for one in OPERATIONS if any(parameter.name == "group" for parameter in one.query)}
        for pattern in sorted(paths):
            path = pattern.format(session="hidden-name", turn=turn.id, sequence=turn.id, sha256=sha256, rest="x")
            query = f"turn={turn.id}&ids=1" if pattern.endswith("/texts") else "group=hidden-group" if pattern in grouped else ""
            for key in ("", "Bearer", "Bearer wrong", f"Bearer {KEY}"):
                async with rig.http.get(f"{rig.url}{path}?{query}", headers={"Authorization": key}) as answer:
                    body = await answer.text()
                if path.startswith("/tokencache/ui") or key.endswith(KEY):
                    assert answer.status == 200, (path, key)
                else:
                    assert answer.status == 401, (path, key)
                if path.startswith("/tokencache/ui") or answer.status == 401:
                    assert not any(word in body for word in ("hidden-name", "hidden-group", turn.id, "failing test", KEY)), path


async def test_the_page_runs_only_its_own_scripts(rig):
    async with rig.http.get(f"{rig.url}/tokencache/ui", allow_redirects=True) as answer:
        assert answer.url.path == "/tokencache/ui/"
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        text = await answer.text()
    assert "http://" not in text
    assert "https://" not in text
    async with rig.http.get(f"{rig.url}/tokencache/ui/main.js") as answer:
        assert (answer.content_type, answer.headers["X-Content-Type-Options"]) == ("text/javascript", "nosniff")
    async with rig.http.get(f"{rig.url}/tokencache/ui/meanings.js") as answer:
        text = await answer.text()
    for name in (*Reason, *IncidentKind):
        assert f'"{name}":"' in text
    assert "](" not in text
    async with rig.http.get(f"{rig.url}/tokencache/ui/none.js") as answer:
        assert answer.status == 404


def test_an_installed_package_has_the_page(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE)
    (wheel,) = tmp_path.glob("*.whl")
    static = ROOT / "tokencache/api/viewer/static"
    with zipfile.ZipFile(wheel) as archive:
        assert {f"tokencache/api/viewer/static/{path.name}" for path in static.iterdir()} <= set(archive.namelist())


async def test_a_store_can_be_viewed_without_an_engine():
    """Ids and figures are shown although no engine was ever reachable."""
    store = MemoryStore()
    await long(store, turns=4, tokens=400, branch_at=2)
    async with proxied(store=store, upstream="http://127.0.0.1:9") as rig:
        outline = await rig.get(f"{V1}/sessions/long/outline")
        assert outline["figures"]["sequences"] == 2
        window = await rig.get(f"{V1}/sessions/long/sequences/{outline['sequences'][1]['id']}/tokens")
        assert window["texts"] is None
        assert window["ids"]

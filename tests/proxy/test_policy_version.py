"""Which policy version sampled the tokens of a turn and computed its prompt, by each source; and calls that wait for an update."""

import asyncio
import contextlib

import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, calls_held, echo, proxied, results, user
from tests.support.plugin_engine import PluginEngine
from tests.support.waiting import PATIENCE, until
from tokencache.core.weights import MIXED
from tokencache.proxy import dispatch
from tokencache.store.base import StoreError
from tokencache.testing import Fault

TALK = [user("EPISODE:talk " + "One, two, three, four, five. " * 20)]
WEIGHTS = "/tokencache/v1/weights"


@pytest.fixture(autouse=True)
def _briskly(monkeypatch):
    monkeypatch.setattr(dispatch, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.02)


@contextlib.asynccontextmanager
async def trained(**settings):
    """An engine in development mode with the weights `v1`, and the proxy before it."""
    engine = PluginEngine(episodes=EPISODES, seed=7, dev_mode=True, token_delay=settings.pop("token_delay", 0.0))
    engine.weights.loaded = "v1"
    async with proxied(engine, hold=settings.pop("hold", PATIENCE), **settings) as rig:
        yield rig


async def announce(rig, path=WEIGHTS, method="PUT", **body):
    async with rig.http.request(method, rig.url + path, json=body) as answer:
        said = await answer.json()
        assert answer.status < 300, said
        return said


def spans(turn):
    return [(span["version"], span["start"], span["end"]) for span in turn["weight_versions"]]


async def one_turn(rig, session="s", **more):
    await rig.say(session, TALK, **more)
    return (await rig.store.turns(session))[-1]


async def sampling(rig, number=1, tokens=3):
    """Wait until the session's so many-th reply is being sampled."""

    async def under_way():
        entries = rig.ground_truth()
        return len(entries) >= number and len(entries[number - 1].completion_ids) >= tokens

    await until(under_way)


def of(turn):
    return turn.version_source, [(span["version"], span["start"], span["end"]) for span in turn.versions], turn.prompt_version, turn.kv


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_known_is_no_span_and_no_salt(stream):
    async with trained() as rig:
        assert of(await one_turn(rig, stream=stream)) == ("", [], "", "")
        assert "cache_salt" not in rig.engine.requests[-1]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}], ids=["whole", "stream", "two"])
async def test_what_the_trainer_announced_is_one_span_and_a_salt(more):
    async with trained() as rig:
        await announce(rig, version="v1")
        turn = await one_turn(rig, **more)
        assert of(turn) == ("trainer", [("v1", 0, turn.completion_tokens)], "v1", "exact")
        assert len(rig.engine.requests[-1]["cache_salt"]) == 32
        assert turn.marks == ()


async def test_a_version_that_is_announced_in_mid_reply_is_not_guessed():
    async with trained(token_delay=0.002) as rig:
        await announce(rig, version="v1")
        call = asyncio.create_task(one_turn(rig))
        await sampling(rig)
        await announce(rig, version="v2")
        turn = await call
        assert of(turn) == ("trainer", [(MIXED, 0, turn.completion_tokens)], MIXED, "exact")
        assert turn.marks == ("mixed-weights", "stale-kv")


async def test_the_first_announcement_in_mid_reply_is_not_guessed():
    async with trained(token_delay=0.002) as rig:
        call = asyncio.create_task(one_turn(rig))
        await sampling(rig)
        await announce(rig, version="v1")
        turn = await call
        assert of(turn) == ("trainer", [(MIXED, 0, turn.completion_tokens)], "", "")
        assert "mixed-weights" in turn.marks


@pytest.mark.parametrize(("mode", "exact"), [("abort", True), ("wait", True), ("keep", True), ("none", False)])
async def test_a_reply_that_ends_while_its_engine_is_paused_has_the_old_version(mode, exact):
    """The trainer changes weights only once the engines are paused; without a pause nobody knows when."""
    async with trained(token_delay=0.002) as rig:
        await announce(rig, version="v1")
        call = asyncio.create_task(rig.post("s", messages=TALK, stream=True))
        await sampling(rig)
        begun = asyncio.create_task(announce(rig, WEIGHTS + "/update", "POST", mode=mode))
        if mode == "keep":
            await begun
            await rig.http.post(rig.up + "/abort_requests", json={})
        await call
        (turn,) = [turn for turn in await rig.store.turns("s") if turn.completion_tokens]
        assert of(turn)[1] == [("v1" if exact else MIXED, 0, turn.completion_tokens)]
        assert turn.prompt_version == ("v1" if exact else MIXED)
        assert "stale-kv" in turn.marks or exact
        await begun


@pytest.mark.parametrize(("clear", "marks"), [(True, ("mixed-weights",)), (False, ("mixed-weights", "stale-kv"))])
async def test_a_kept_reply_whose_keys_and_values_are_kept_is_marked(clear, marks):
    async with trained(token_delay=0.002) as rig:
        await announce(rig, version="v1")
        call = asyncio.create_task(one_turn(rig))
        await sampling(rig)
        begun = await announce(rig, WEIGHTS + "/update", "POST", mode="keep", clear_cache=clear)
        rig.engine.weights.loaded = "v2"
        await announce(rig, f"{WEIGHTS}/update/{begun['id']}/finish", "POST", version="v2")
        turn = await call
        assert set(rig.ground_truth()[0].versions) == {"v1", "v2"}
        assert of(turn)[1] == [(MIXED, 0, turn.completion_tokens)]
        assert turn.marks == marks


async def test_the_engines_own_spans_are_exact_where_the_trainers_are_not():
    async with trained(token_delay=0.002) as rig:
        rig.engine.metadata.style = "spans"
        await announce(rig, version="v1")
        rig.engine.weights.label = "v1"
        call = asyncio.create_task(one_turn(rig))
        await sampling(rig)
        begun = await announce(rig, WEIGHTS + "/update", "POST", mode="keep")
        rig.engine.weights.loaded = "v2"
        await announce(rig, f"{WEIGHTS}/update/{begun['id']}/finish", "POST", version="v2")
        turn = await call
        truth = rig.ground_truth()[0].versions
        source, found, prompt, _ = of(turn)
        assert (source, found, prompt) == ("reply", [("v1", 0, truth.index("v2")), ("v2", truth.index("v2"), len(truth))], "v1")
        assert turn.marks == ()


@pytest.mark.parametrize(("style", "stream"), [("header", True), ("header", False), ("metadata", False)])
async def test_one_version_of_a_whole_reply_is_not_believed_if_the_weights_changed_meanwhile(style, stream):
    """A header has that of the first token, SGLang's metadata that of the last."""
    async with trained(token_delay=0.002) as rig:
        rig.engine.metadata.style, rig.engine.weights.label = style, "v1"
        await announce(rig, version="v1")
        before = await one_turn(rig, "before", stream=stream)
        assert of(before)[:2] == ("reply", [("v1", 0, before.completion_tokens)])
        call = asyncio.create_task(one_turn(rig, stream=stream))
        await sampling(rig)
        begun = await announce(rig, WEIGHTS + "/update", "POST", mode="keep")
        rig.engine.weights.loaded = rig.engine.weights.label = "v2"
        await announce(rig, f"{WEIGHTS}/update/{begun['id']}/finish", "POST", version="v2")
        turn = await call
        assert set(rig.ground_truth()[-1].versions) == {"v1", "v2"}
        assert of(turn)[1:3] == ([(MIXED, 0, turn.completion_tokens)], MIXED)


async def test_an_engine_that_reports_another_version_than_was_announced_is_believed():
    """An engine that comes back with older weights: its own report counts, and the prompt is not certain."""
    async with trained() as rig:
        rig.engine.metadata.style, rig.engine.weights.label = "spans", "v0"
        await announce(rig, version="v1")
        turn = await one_turn(rig)
        assert of(turn) == ("reply", [("v0", 0, turn.completion_tokens)], MIXED, "exact")


async def test_the_engines_label_counts_if_no_trainer_speaks():
    async with trained() as rig:
        rig.engine.weights.label = "7"

        async def labelled():
            return rig.proxy.engine.weight_label == "7"

        await until(labelled)
        turn = await one_turn(rig)
        assert of(turn) == ("engine", [("7", 0, turn.completion_tokens)], "7", "exact")
        await announce(rig, version="v1")
        assert of(await one_turn(rig))[0] == "trainer"


async def test_a_label_that_changes_in_mid_reply_is_not_guessed_and_default_names_nothing():
    async with trained(token_delay=0.002) as rig:
        rig.engine.weights.label = "7"

        async def labelled():
            return rig.proxy.engine.weight_label == "7"

        await until(labelled)
        for number, label in enumerate(["8", "default"], 1):
            call = asyncio.create_task(one_turn(rig))
            await sampling(rig, number)
            rig.engine.weights.label = label
            turn = await call
            assert of(turn)[1] == [(MIXED, 0, turn.completion_tokens)]
        assert of(await one_turn(rig)) == ("", [], "", "")


async def test_an_adapter_has_its_name_and_path():
    async with trained() as rig:
        rig.engine.weights.adapters["policy"] = "/a"
        salts = []
        for path in ("/a", "/b"):
            rig.engine.weights.adapters["policy"] = path
            turn = await one_turn(rig, model="policy")
            assert of(turn) == ("adapter", [(f"policy@{path}", 0, turn.completion_tokens)], f"policy@{path}", "exact")
            salts.append(rig.engine.requests[-1]["cache_salt"])
        assert salts[0] != salts[1]


async def test_an_adapter_has_the_engines_label_too_which_is_that_of_the_base_model():
    async with trained() as rig:
        rig.engine.weights.label, rig.engine.weights.adapters["policy"] = "7", "/a"

        async def labelled():
            return rig.proxy.engine.weight_label == "7"

        await until(labelled)
        assert (await one_turn(rig, model="policy")).prompt_version == "policy@/a+7"


async def test_an_adapter_that_is_reloaded_under_one_path_needs_an_announcement():
    async with trained() as rig:
        rig.engine.weights.adapters["policy"] = "/a"
        turns = [await one_turn(rig, "a", model="policy")]
        rig.engine.weights.overwritten["/a"] = "other values"
        turns.append(await one_turn(rig, "b", model="policy"))
        assert {turn.prompt_version for turn in turns} == {"policy@/a"}
        assert rig.ground_truth("b")[-1].cached > 0  # nothing showed that it has other values
        await announce(rig, version="v2")
        turn = await one_turn(rig, "c", model="policy")
        assert (turn.prompt_version, rig.ground_truth("c")[-1].cached) == ("v2", 0)


async def test_new_calls_wait_while_weights_are_replaced_and_are_answered_by_the_new_ones():
    async with trained() as rig:
        await announce(rig, phase="updating", owner="t")
        before = calls_held("updating")
        call = asyncio.create_task(one_turn(rig))
        await until(lambda: calls_held("updating") > before)
        assert not rig.ground_truth()
        rig.engine.weights.loaded = "v2"
        await announce(rig, version="v2", owner="t")
        turn = await call
        assert of(turn) == ("trainer", [("v2", 0, turn.completion_tokens)], "v2", "exact")
        (held,) = (await rig.info())["incidents"]
        assert held["kind"] == "held"
        assert "updated by 't'" in held["detail"]
        assert (await rig.info())["complete"]


async def test_a_call_waits_no_longer_than_it_may():
    async with trained(hold=0.05) as rig:
        await announce(rig, phase="updating")
        status, said = await rig.post("s", messages=TALK)
        assert status == 503
        assert "being updated" in said["error"]["message"]


async def test_an_update_that_ends_without_a_version_leaves_it_unknown_and_its_keys_and_values_apart():
    async with trained() as rig:
        await announce(rig, version="v1")
        await rig.say("s", TALK)
        begun = await announce(rig, WEIGHTS + "/update", "POST", mode="abort")
        rig.engine.weights.loaded = "half"
        await announce(rig, f"{WEIGHTS}/update/{begun['id']}", "DELETE")
        turn = await one_turn(rig)
        assert of(turn) == ("", [], "", "")
        assert rig.ground_truth()[-1].cached == 0


async def test_a_version_that_is_set_back_does_not_find_what_it_computed_before():
    async with trained() as rig:
        for version in ("v1", "v2", "v1"):
            await announce(rig, version=version)
            await rig.say("s", TALK)
        salts = [body["cache_salt"] for body in rig.engine.requests[-3:]]
        assert len(set(salts)) == 3


async def test_while_the_store_does_not_answer_nothing_is_certain(monkeypatch):
    async with trained() as rig:
        await announce(rig, version="v1")
        await rig.say("s", TALK)

        async def away():
            raise StoreError("away")

        with monkeypatch.context() as patched:
            patched.setattr(rig.store, "weights", away)
            turn = await one_turn(rig)
        assert of(turn) == ("trainer", [(MIXED, 0, turn.completion_tokens)], MIXED, "exact")
        assert of(await one_turn(rig))[2] == "v1"


async def test_engines_with_different_versions_each_have_their_own():
    other = PluginEngine(episodes=EPISODES, seed=7)
    async with other.serve() as second, trained() as rig:
        async with rig.http.post(rig.url + "/tokencache/v1/engines", json={"url": second}) as answer:
            assert answer.status == 201
        await until(lambda: _serving(rig, 2))
        await announce(rig, version="v1")
        await announce(rig, version="v2", engines=[second])
        for session in map(str, range(8)):
            turn = await one_turn(rig, session)
            here = any(entry.session == session for entry in rig.engine.ground_truth)
            assert turn.prompt_version == ("v1" if here else "v2")
        await announce(rig, phase="updating", engines=[second])
        for session in map(str, range(8)):
            assert (await one_turn(rig, session)).prompt_version == "v1"  # the other engine takes them meanwhile


async def _serving(rig, number):
    return sum(engine["serves"] for engine in (await rig.readiness())["engines"]) == number


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
async def test_in_other_dialects(path):
    body = {"model": "sim", "max_tokens": 50}
    body |= {"/v1/messages": {"messages": TALK}, "/v1/responses": {"input": "hello"}, "/v1/completions": {"prompt": "hello"}}[path]
    body.pop("max_tokens") if path == "/v1/responses" else None
    async with trained() as rig:
        await announce(rig, version="v1")
        status, _ = await rig.post("s", path, **body)
        assert status == 200
        (turn,) = await rig.store.turns("s")
        assert of(turn) == ("trainer", [("v1", 0, turn.completion_tokens)], "v1", "exact")
        assert "cache_salt" in (rig.engine.completions if path.endswith("completions") else rig.engine.requests)[-1]


@pytest.mark.parametrize("policy", ["exact", "session", "off"])
async def test_what_a_policy_does_after_an_update(policy):
    async with trained(kv=policy) as rig:
        messages = [user("EPISODE:demo " + "One, two, three, four, five. " * 20)]
        for version in ("v1", "v1", "v2"):
            rig.engine.weights.loaded = version
            await announce(rig, version=version)
            message = await rig.say("s", messages, tools=TOOLS)
            messages += [echo(message), *results(message)]
        first, second, third = await rig.store.turns("s")
        assert [turn.kv for turn in (first, second, third)] == [policy] * 3
        versions = {"exact": ["v1", "v1", "v2"], "session": ["v1", "v1", MIXED], "off": [MIXED] * 3}[policy]
        assert [turn.prompt_version for turn in (first, second, third)] == versions
        assert [turn.marks for turn in (first, second, third)] == [(), (), ("hybrid-kv",) if policy == "session" else ()]
        cached = [entry.cached for entry in rig.ground_truth()]
        assert cached[1] > 0
        assert (cached[2] > 0) == (policy != "exact")
        stale = set(rig.ground_truth()[2].prompt_versions) == {"v1", "v2"}
        assert stale == (policy != "exact")


@pytest.mark.parametrize("refused", [False, True])
async def test_another_replica_keeps_to_the_version_of_the_sessions_first_call(refused):
    """The first call that has a turn: one that the engine refuses stores nothing."""
    async with trained(kv="session") as rig:
        await announce(rig, version="v1")
        if refused:
            rig.engine.faults.append(Fault.answer(400, "{}"))
            assert (await rig.post("s", messages=TALK))[0] == 400
        await rig.say("s", TALK)
        await announce(rig, version="v2")
        async with proxied(rig.engine, rig.store, upstream=rig.up, kv="session") as other:
            turn = await one_turn(other)
        assert "hybrid-kv" in turn.marks
        assert len({body["cache_salt"] for body in rig.engine.requests if "EPISODE:talk" in str(body["messages"])}) == 1


async def test_a_harnesss_own_salt_still_separates():
    async with trained() as rig:
        await announce(rig, version="v1")
        for own in ("a", "b", None, "a"):
            status, _ = await rig.post("s", messages=TALK, cache_salt=own)
            assert status == 200
        first, second, none, again = [body["cache_salt"] for body in rig.engine.requests[-4:]]
        assert first == again
        assert len({first, second, none}) == 3
        async with rig.http.post(rig.url + CHAT, json={"model": "sim", "messages": TALK}, headers={HEADER: "t"}) as answer:
            assert answer.status == 200
        assert rig.engine.requests[-1]["cache_salt"] == none

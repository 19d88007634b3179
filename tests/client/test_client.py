"""Either client against a proxy and an engine on real sockets."""

import asyncio
import contextlib

import msgspec
import openai
import pytest

from tests.client.both import KINDS, Wrapped
from tests.proxy.kit import EPISODES, proxied, user
from tests.support.waiting import PATIENCE, until
from tokencache.adapters.load import AdapterError
from tokencache.client import (
    AsyncClient,
    Budget,
    Client,
    ClientError,
    EngineInUseError,
    InvalidUrlError,
    NotFoundError,
    RefusedError,
    SealedError,
    Trajectory,
    UnauthorizedError,
    UnreachableError,
    WaitTimeoutError,
    WrongServerError,
)
from tokencache.testing import Fault, SimulatedEngine


async def chat(session, turns=2):
    messages = [user("EPISODE:talk")]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0) as model:
        for _ in range(turns):
            reply = await model.chat.completions.create(model="sim", messages=messages)
            messages += [reply.choices[0].message.model_dump(exclude_none=True, include={"role", "content"}), user("go on")]


@contextlib.asynccontextmanager
async def open_call(rig, session):
    """A call that the engine does not answer."""
    rig.engine.faults.append(Fault.hang())
    call = asyncio.create_task(rig.post(session, messages=[user("EPISODE:talk")]))

    async def begun():
        info = await rig.store.session(session)
        return info is not None and info.open_calls

    try:
        yield (await until(begun))[0].call
    finally:
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call


@pytest.mark.parametrize("scheme", ["http", "socks5"])
@pytest.mark.parametrize("kind", KINDS.values())
async def test_a_proxy_for_other_hosts_is_not_asked_for_this_machine(rig, kind, scheme, monkeypatch):
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, f"{scheme}://127.0.0.1:1")
    async with Wrapped(kind(rig.url)) as client:
        assert await client.conditions()


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_web_proxy_that_httpx_cannot_use_is_no_traceback(kind, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks://proxy:1080")
    with pytest.raises(ClientError, match=r"ALL_PROXY cannot be used: .*socks"):
        kind("http://tokencache:8100")


async def test_requests_that_wait_at_the_proxy_hold_up_no_others(rig):
    """A trainer waits for as many sessions at once as it plays rollouts."""
    waiting, count = asyncio.Event(), 150
    seen = []
    begin = rig.store.session

    async def slow(session):
        seen.append(session)
        if len(seen) == count:
            waiting.set()
        await waiting.wait()
        return await begin(session)

    rig.store.session = slow
    async with AsyncClient(rig.url) as client:
        found = await asyncio.gather(*(client.session(f"r{n}").state() for n in range(count)), return_exceptions=True)
    assert {type(one) for one in found} == {NotFoundError}
    assert len(seen) == count, "no request was sent again because others had all connections"


async def test_a_rollout_from_key_to_tokens(rig, client):
    session = await client.create("r1")
    await chat(session)
    state = await session.wait(turns=2)
    assert (state.session, state.turns, state.open_calls, state.complete) == ("r1", 2, [], True)
    await session.finish(0.5)
    await session.seal()
    assert (await session.wait(sealed=True)).sealed
    trajectory = await session.fetch()
    assert isinstance(trajectory, Trajectory)
    assert trajectory.complete
    assert trajectory.figures.turns == 2
    (sequence,) = trajectory.sequences
    assert len(sequence.token_ids) == len(sequence.loss_mask) == len(sequence.logprobs) == sequence.tokens
    for span, entry in zip(sequence.turns, rig.ground_truth("r1"), strict=True):
        (start, end), (_, prompt) = span.completion, span.prompt
        assert sequence.token_ids[:prompt] == entry.prompt_ids
        assert sequence.token_ids[start:end] == entry.completion_ids
        assert sequence.logprobs[start:end] == entry.logprobs
        assert span.served.content
    assert sum(sequence.loss_mask) == sequence.trainable_tokens
    assert sequence.weight == 1.0
    await session.delete()
    with pytest.raises(NotFoundError, match="404: there is no session 'r1'"):
        await session.state()


async def test_a_session_without_a_name_gets_a_random_one(client):
    first, second = await client.create(), await client.create(harness="openai")
    assert first.id.startswith("rollout-")
    assert second.id.startswith("openai-")
    assert first.key != second.key
    assert first.headers == {"Authorization": f"Bearer {first.key}"}
    assert first.key not in repr(first.inner)


async def test_another_process_opens_a_session_by_its_name(client):
    await chat(client.inner.session("r1"), turns=1)
    assert len((await Wrapped(client.inner.session("r1")).fetch()).sequences) == 1


async def test_limits_of_length(client):
    session = await client.create("r1")
    await chat(session, turns=2)
    (whole,) = (await session.fetch()).sequences
    limits = {"max_length": whole.tokens - 1, "max_prompt_length": None, "overlong": "cut"}
    cut = await session.fetch(**limits)
    assert (len(cut.sequences[0].turns), cut.sequences[0].overlong, cut.figures.overlong.cut) == (1, "cut", 1)
    assert msgspec.json.decode(await session.fetch_json(drift="off", **limits))["sequences"][0]["overlong"] == "cut"
    (output,) = (await session.fetch("verl", **limits))["outputs"]
    assert output["prompt_ids"] + output["response_ids"] == cut.sequences[0].token_ids
    await session.finish()
    (taken,) = [one async for one in client.iterate(["r1"], max_response_length=1, overlong="drop")]
    assert (taken.sequences, taken.figures.overlong.dropped) == ([], 1)
    with pytest.raises(RefusedError, match="overlong must be one of: drop, cut, mask"):
        await session.fetch(max_length=5)


async def test_other_formats_are_plain_json(client):
    session = await client.create("r1")
    await chat(session, turns=1)
    with pytest.raises(RefusedError, match="'nope' is not one of: native"):
        await session.fetch("nope")


async def test_the_sampling_of_a_key_is_sent_to_the_engine(rig, client):
    with pytest.warns(UserWarning, match="temperature is 0.25, and the engine's log probabilities are raw"):
        session = await client.create("r1", sampling={"temperature": 0.25}, models={"gpt-*": "sim"})
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        await model.chat.completions.create(model="gpt-9", messages=[user("EPISODE:talk")], temperature=1.0)
    (turn,) = (await session.fetch()).sequences[0].turns
    assert turn.sampling["temperature"] == 0.25
    assert turn.replaced == {"temperature": 1.0}
    assert turn.model == "sim"


async def test_the_budget_of_a_key_ends_its_session(rig, client):
    session = await client.create(budget=Budget(calls=1))
    await chat(session)
    assert len(rig.ground_truth(session.id)) == 1
    assert [incident.kind for incident in (await session.state()).incidents] == ["budget-spent"]


async def test_sessions_are_listed(client):
    for name in ("a-1", "a-2", "b-1"):
        await chat(await client.create(name), turns=1)
    assert sorted(state.session for state in await client.sessions()) == ["a-1", "a-2", "b-1"]
    assert sorted(state.session for state in await client.sessions("a-")) == ["a-1", "a-2"]


async def test_the_figures_of_a_run(client):
    for name, finish in {"a": {"reward": 1.0}, "b": {"reward": 0.0}, "c": {"failed": "engine"}, "d": {"reward": 9.0}}.items():
        session = await client.create(name, tags=["run:r"] if name != "d" else [], group="g", metadata={"group_size": 4})
        await chat(session, turns=1)
        await session.finish(**finish)
    found = await client.report("r")
    assert (found.valid, found.failures, found.pass_rate, found.expected) == (2, {"engine": 1}, 0.5, 1)
    assert found.values["reward"].mean == 0.5
    assert [one.session for one in found.groups[0].rollouts] == ["a", "b", "c"]
    assert (await client.report("r", passing=0.0)).pass_rate == 1.0
    assert (await client.report("r", limit=0)).groups == []
    assert (await client.report()).values["reward"].most == 9.0
    assert [(one.run, one.valid) for one in await client.runs()] == [("r", 2)]
    assert [state.session for state in await client.sessions(outcome="engine")] == ["c"]
    with pytest.raises(NotFoundError, match="no session is in run 'x'"):
        await client.report("x")


# --- the environment of a harness ---


async def test_the_environment_of_a_harness(client, rig):
    session = await client.create("r1", harness="claude-code")
    assert session.env["ANTHROPIC_BASE_URL"] == f"{rig.url}/s/r1/h/claude-code"
    assert session.env["ANTHROPIC_AUTH_TOKEN"] == session.key
    assert session.env["ANTHROPIC_MODEL"] == "sim"
    assert session.env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "131072"
    assert "CLAUDE_CONFIG_DIR" not in session.env
    whole = session.launch.environment({"PATH": "/bin", "ANTHROPIC_API_KEY": "mine", "TOKENCACHE_ADMIN_KEY": "secret"})
    assert whole == {"PATH": "/bin", **session.env}
    assert (await client.create("r2")).env == {}


async def test_a_harness_that_keeps_its_settings_in_a_file(client, rig, tmp_path):
    with pytest.raises(AdapterError, match=r"Codex CLI reads the URL of the proxy from a configuration file.*config_dir"):
        await client.create("r1", harness="codex")
    session = await client.create("r1", harness="codex", config_dir=tmp_path / "codex")
    assert session.env["CODEX_HOME"] == str(tmp_path / "codex")
    assert f'base_url = "{rig.url}/s/r1/h/codex/v1"' in (tmp_path / "codex" / "config.toml").read_text()


async def test_an_unknown_harness(client, rig):
    with pytest.raises(AdapterError, match="no adapter 'nobody'"):
        await client.create("r1", harness="nobody")


# --- waiting ---


async def test_waiting_for_turns(client):
    session = await client.create("r1")
    waiting = asyncio.create_task(session.wait(turns=2))
    await chat(session)
    assert (await waiting).turns == 2


async def test_a_timeout_names_the_conditions(client, rig):
    session = await client.create("r1")
    with pytest.raises(
        WaitTimeoutError, match="waited 0 s for no open call and at least 3 turns; it has 0 turns and no open call, and is not finished"
    ):
        await session.wait(turns=3, timeout=0)
    async with open_call(rig, "r1") as call:
        with pytest.raises(TimeoutError, match=f"for no open call; it has 0 turns and open calls: {call}, and is not finished"):
            await session.wait(timeout=0)


async def test_waiting_ends_if_a_session_is_sealed_with_fewer_turns(client):
    session = await client.create("r1")
    await chat(session, turns=1)
    await session.finish()
    await session.seal()
    with pytest.raises(SealedError, match="sealed with 1 turns: 2 cannot come"):
        await session.wait(turns=2)


async def test_a_session_that_never_began(client):
    session = Wrapped(client.inner.session("r1"))
    for ask in (session.wait, session.finish, session.seal, session.fetch, session.rewards, session.label, session.delete):
        with pytest.raises(NotFoundError):
            await ask()


# --- iterating over trajectories ---


async def three(client, *, finished=True):
    for name in ("a", "b", "c"):
        session = await client.create(name)
        await chat(session, turns=1)
        if finished:
            await session.finish()


async def left(client):
    return sorted(state.session for state in await client.sessions())


async def test_trajectories_come_in_the_given_order_and_nothing_is_changed(client):
    await three(client)
    taken = [trajectory async for trajectory in client.iterate(["b", "a", "c"])]
    assert [(one.session, one.state, one.complete) for one in taken] == [
        ("b", "finished", True),
        ("a", "finished", True),
        ("c", "finished", True),
    ]
    assert await left(client) == ["a", "b", "c"]


async def test_a_rollout_that_still_runs_is_neither_sealed_nor_deleted(client):
    """`iterate` sealed and deleted rollouts that were running, and called them complete."""
    await three(client, finished=False)
    with pytest.raises(
        WaitTimeoutError, match=r"'a': waited 0 s for .*its end \(session.finish\); it has 1 turns and .* not finished. Finish"
    ):
        _ = [one async for one in client.iterate(["a"], seal=True, delete=True, timeout=0)]
    assert await left(client) == ["a", "b", "c"]
    session = Wrapped(client.inner.session("a"))
    await chat(session, turns=1)  # it goes on
    assert (await session.state()).turns == 2


async def test_a_rollout_that_is_taken_by_force_says_so(client, rig):
    await three(client, finished=False)
    (taken,) = [one async for one in client.iterate(["a"], seal=True, force=True, timeout=0)]
    assert (taken.state, taken.complete, [incident.kind for incident in taken.incidents]) == ("sealed", False, ["sealed-early"])
    async with open_call(rig, "b"):
        (taken,) = [one async for one in client.iterate(["b"], force=True, timeout=0)]
        assert (taken.state, taken.complete, [incident.kind for incident in taken.incidents]) == ("open", False, ["call-open"])


async def test_processed_sessions_are_deleted_if_asked(client):
    await three(client)
    taken = [trajectory async for trajectory in client.iterate(["a", "b", "c"], seal=True, delete=True)]
    assert all(one.sealed for one in taken)
    assert await left(client) == []


async def test_sessions_that_were_not_processed_are_kept(client):
    """The consumer fails while it processes a trajectory. That session and those after it are not deleted."""
    await three(client)
    iteration = client.iterate(["a", "b", "c"], delete=True)
    await anext(iteration)
    await anext(iteration)
    await iteration.aclose()
    assert await left(client) == ["b", "c"]


async def test_without_names_only_finished_sessions_are_returned(client):
    await three(client, finished=False)
    await Wrapped(client.inner.session("b")).finish()
    assert [one.session async for one in client.iterate(delete=True)] == ["b"]
    assert await left(client) == ["a", "c"]


async def test_unknown_names_are_reported_at_the_end(client):
    await three(client)
    iteration = client.iterate(["x", "a", "y", "b"])
    assert [(await anext(iteration)).session, (await anext(iteration)).session] == ["a", "b"]
    with pytest.raises(NotFoundError, match="no session 'x', 'y'; all others were returned"):
        await anext(iteration)


async def test_a_session_with_an_open_call_is_waited_for(client, rig):
    session = await client.create("a")
    async with open_call(rig, "a") as call:
        await session.finish()
        with pytest.raises(WaitTimeoutError, match=f"open calls: {call}, and is finished"):
            _ = [one async for one in client.iterate(["a"], timeout=0)]


async def test_one_string_is_not_a_collection_of_names(client):
    """Its letters were taken as names; and it could be a prefix, as in `sessions`."""
    await three(client)
    with pytest.raises(TypeError, match=r"names: 'abc' is a string, not a collection of names. For one session write \['abc'\]"):
        client.iterate("abc")
    assert await left(client) == ["a", "b", "c"]


# --- as they finish ---


async def test_trajectories_come_as_their_sessions_finish(client):
    await three(client, finished=False)
    iteration = client.as_completed(["a", "b", "c"], timeout=PATIENCE)
    for name in ("c", "a", "b"):
        session = Wrapped(client.inner.session(name))
        coming = asyncio.create_task(anext(iteration))
        await asyncio.sleep(0)
        await session.finish(1.0)
        taken = await coming
        assert (taken.session, taken.state, taken.reward) == (name, "finished", 1.0)
    with pytest.raises(StopAsyncIteration):
        await anext(iteration)
    assert await left(client) == ["a", "b", "c"]


async def test_what_has_finished_comes_although_the_time_is_over(client):
    """A trainer that takes long with one trajectory, or is stopped, loses no other."""
    await three(client)
    iteration = client.as_completed(["a", "b"], timeout=0.0)
    assert {(await anext(iteration)).session, (await anext(iteration)).session} == {"a", "b"}


async def test_sessions_that_do_not_finish_are_named(client):
    await three(client, finished=False)
    await Wrapped(client.inner.session("b")).finish()
    iteration = client.as_completed(["a", "b", "x"], timeout=0.1)
    assert (await anext(iteration)).session == "b"
    with pytest.raises(WaitTimeoutError, match=r"waited 0.1 s for sessions to finish: 'a'$"):
        await anext(iteration)
    with pytest.raises(TypeError, match="is a string"):
        client.as_completed("abc")
    await Wrapped(client.inner.session("a")).finish()
    iteration = client.as_completed(["a", "x"])
    assert (await anext(iteration)).session == "a"
    with pytest.raises(NotFoundError, match="no session 'x'"):
        await anext(iteration)


# --- access ---


@pytest.mark.parametrize("key", ["secret", "schlüssel-ключ", "of a file\n"])
@pytest.mark.parametrize("kind", KINDS.values())
async def test_the_admin_key(kind, key):
    async with proxied(admin_key=key) as rig, Wrapped(kind(rig.url)) as stranger, Wrapped(kind(rig.url, key)) as trainer:
        with pytest.raises(UnauthorizedError, match="POST /tokencache/v1/keys: 401: this needs the admin key"):
            await stranger.create("r1")
        session = await trainer.create("r1", harness="openai")
        await chat(session, turns=1)
        assert (await session.state()).turns == 1
        assert session.env["OPENAI_API_KEY"] == session.key != key


def test_no_proxy():
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(UnreachableError, match=r"POST /tokencache/v1/keys: no answer: .*run at http://127.0.0.1:1"),
    ):
        client.create()


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("path", ["/v1", "/s/r1/v1", "/s/r1/h/codex"])
def test_the_url_of_a_route_is_refused(kind, path):
    with pytest.raises(InvalidUrlError, match=f"'http://p:8100{path}' is not the base URL of a tokencache proxy.*Use 'http://p:8100'"):
        kind(f"http://p:8100{path}")


@pytest.mark.parametrize("kind", KINDS.values())
async def test_the_address_of_the_engine(kind, rig):
    wanted = f"{rig.up} is not a tokencache proxy: it answered 404: .*Name the address of `tokencache serve`"
    async with Wrapped(kind(rig.up)) as client:
        session = Wrapped(client.inner.session("r1"))
        for ask in (client.create, client.sessions, session.fetch, session.seal, session.delete):
            with pytest.raises(WrongServerError, match=wanted):
                await ask()
        with pytest.raises(WrongServerError, match=wanted):
            await anext(client.iterate(["r1"]))


async def test_engines_are_added_and_removed(rig, client):
    other = SimulatedEngine(episodes=EPISODES, seed=7)
    async with other.serve() as url:
        added = await client.add_engine(url + "/v1")
        assert (added.url, added.state, added.drained) == (url, "serving", False)

        async def both_serve():
            return [engine.url for engine in await client.engines() if engine.serves] == [rig.up, url]

        await until(both_serve)
        with pytest.raises(EngineInUseError, match="not drained yet"):
            await client.remove_engine(url)
        with pytest.raises(EngineInUseError, match="--upstream"):
            await client.remove_engine(rig.up, force=True)
        assert (await client.drain_engine(url)).state == "draining"
        await client.remove_engine(url, force=True)
        assert [engine.url for engine in await client.engines()] == [rig.up]
        with pytest.raises(NotFoundError):
            await client.drain_engine(url)

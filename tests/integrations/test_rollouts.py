"""Rollouts from creation to rows: settings, labels, reward, limits, and how a step goes on if some of them fail."""

import asyncio
import os

import openai
import pytest

from examples.integrations.guessing import play
from tests.integrations.kit import branching, failing, guessing_engine, looking, without_reward
from tests.proxy.kit import proxied
from tests.support.plugin_engine import PluginEngine
from tokencache.client import AsyncClient, Trajectory, UnauthorizedError
from tokencache.integrations.fetching import Fetching
from tokencache.integrations.rollouts import FailedRollout, Rollouts, TooManyFailuresError, load_play
from tokencache.integrations.rows import RowsError

SAMPLE = {"secret": 2}


@pytest.fixture
async def rig():
    async with proxied(guessing_engine()) as made, AsyncClient(made.url) as client:
        made.client = client
        yield made


def rollouts(harness, rows="main", lengths=None, **members):
    lengths = lengths or {}
    return Rollouts(play=harness, read=Fetching(form="trl", rows=rows, several=False, lengths=lengths), **{"run": "r", **members})


def sometimes(*failures):
    """A harness whose first rollouts raise these, one each; `None` is a rollout that does well."""
    left = list(failures)

    async def harness(session, sample):
        failure = left.pop(0) if left else None
        if failure is not None:
            raise failure
        return await play(session, sample)

    return harness


async def test_a_rollout_is_rewarded_labelled_and_sealed(rig):
    made = rollouts(play, options={"tags": ["mine"], "sampling": {"temperature": 1.0}})
    done = await made.one(rig.client, SAMPLE, sampling={"temperature": 0.1, "top_k": 0}, group="g")
    trajectory = done.trajectory
    assert (trajectory.reward, trajectory.group, trajectory.state, trajectory.complete) == (0.75, "r-g", "sealed", True)
    assert trajectory.tags == ["mine", "run:r"]
    sampled = {(turn.sampling["temperature"], turn.sampling["top_k"]) for sequence in trajectory.sequences for turn in sequence.turns}
    assert sampled == {(1.0, 0)}
    assert [row["tokencache"]["id"] for row in done.export["rows"]] == [sequence.id for sequence in trajectory.sequences] == list(done.kept)
    assert not done.dropped
    (state,) = await rig.client.sessions(tag="run:r")
    assert state.sealed


async def test_a_string_as_tags_is_refused(rig):
    with pytest.raises(TypeError, match="'mine' is a string"):
        await rollouts(play, options={"tags": "mine"}).one(rig.client, SAMPLE, sampling={}, group="g")


async def test_what_is_left_out_is_listed(rig):
    done = await rollouts(branching, rows="longest").one(rig.client, SAMPLE, sampling={}, group="g")
    assert len(done.kept) == 1
    trainable = {sequence.id: sequence.trainable_tokens for sequence in done.trajectory.sequences}
    assert {one["sequence"]: one["trainable_tokens"] for one in done.dropped} == {
        name: tokens for name, tokens in trainable.items() if name not in done.kept
    }
    assert all(one["reason"] for one in done.dropped)


async def test_a_rollout_without_a_row_that_fits_the_limits_is_not_played_again(rig):
    limits = {"max_response_length": 1, "overlong": "drop"}
    failed = await rollouts(play, lengths=limits, retries=2).one(rig.client, SAMPLE, sampling={}, group="g")
    assert failed.kind == "untrainable"
    assert "longer than the limits" in failed.detail
    assert "no row to train on" in failed.detail
    (state,) = await rig.client.sessions()
    assert (state.valid, state.reward) == (True, 0.75)


async def test_what_a_harness_says_of_its_failure_may_have_bytes_that_are_no_text(rig):
    async def breaking(session, sample):
        raise RuntimeError("no file " + os.fsdecode(b"\xe4.txt"))

    failed = await rollouts(breaking).one(rig.client, SAMPLE, sampling={}, group="g")
    state = await rig.client.session(failed.session).state()
    assert (state.state, state.outcome, state.outcome_detail) == ("finished", "harness", failed.detail)
    assert failed.detail == "RuntimeError: no file \ufffd.txt"


async def test_a_rollout_whose_policy_version_is_too_old_is_not_called_too_long(rig):
    async def updating(session, sample):
        reward = await play(session, sample)
        await rig.client.set_weights("8")
        return reward

    await rig.client.set_weights("7")
    failed = await rollouts(updating, lengths={"max_lag": 0}).one(rig.client, SAMPLE, sampling={}, group="g")
    assert failed.kind == "untrainable"
    assert "lags more than 0 policy versions, or its lag is not known" in failed.detail
    assert "longer" not in failed.detail


async def test_weights_that_are_announced_while_a_rollout_is_read_leave_no_row_without_its_export(rig):
    """The rows are read twice. None may be chosen that the export does not have any more."""

    class Announcing:
        def __init__(self, session):
            self.inner = session

        def __getattr__(self, name):
            return getattr(self.inner, name)

        async def trajectory(self, **options):
            found = await self.inner.trajectory(**options)
            await rig.client.set_weights("8")
            return found

    await rig.client.set_weights("7")
    fetch = Fetching(form="trl", rows="main", several=False, lengths={"max_lag": 0})

    async def read(session, trajectory):
        return await fetch(Announcing(session), trajectory)

    done = await Rollouts(play=play, read=read, run="r").one(rig.client, SAMPLE, sampling={}, group="g")
    exported = {row["tokencache"]["id"] for row in done.export["rows"]}
    assert done.kept
    assert done.kept <= exported


async def titled(session, sample):
    """A harness that first asks for a title, as Claude Code and OpenCode do."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        await model.chat.completions.create(model="sim", messages=[{"role": "user", "content": "T"}])
    return await branching(session, sample)


@pytest.mark.parametrize("rows", ["main", "longest"])
@pytest.mark.parametrize("overlong", ["cut", "drop"])
async def test_a_row_that_is_too_long_is_not_replaced_by_a_side_call(rig, rows, overlong):
    whole = await rollouts(titled, rows=rows).one(rig.client, SAMPLE, sampling={}, group="g")
    title, *_, line = whole.trajectory.sequences
    assert list(whole.kept) == [line.id]
    assert title.tokens < line.turns[0].completion[1], "the first turn of the main line is longer than the title"
    fits = {"max_length": title.tokens, "overlong": overlong}
    done = await rollouts(titled, rows=rows, lengths=fits).one(rig.client, SAMPLE, sampling={}, group="g")
    assert done.kind == "untrainable", f"{done.kept} is trained with the reward of the rollout"


@pytest.mark.parametrize("rows", ["main", "longest"])
async def test_a_row_that_is_cut_stays_the_one_that_is_trained(rig, rows):
    whole = await rollouts(titled, rows=rows).one(rig.client, SAMPLE, sampling={}, group="g")
    line = whole.trajectory.sequences[-1]
    limits = {"max_length": line.tokens - 1, "overlong": "cut"}
    done = await rollouts(titled, rows=rows, lengths=limits).one(rig.client, SAMPLE, sampling={}, group="g")
    (row,) = done.rows.kept
    assert (row.sequence.overlong, len(row.sequence.turns)) == ("cut", len(line.turns) - 1)
    assert row.sequence in done.trajectory.sequences
    assert {one["sequence"] for one in done.dropped} == {one.id for one in done.trajectory.sequences} - {row.sequence.id}


async def rewarding_too_early(session, sample):
    """A harness whose grader rewards both answers to a question, and that then goes on from the second one."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:

        async def ask(messages, text, **options):
            question = [*messages, {"role": "user", "content": text}]
            reply = await model.chat.completions.create(model="sim", messages=question, **options)
            return [*question, {"role": "assistant", "content": reply.choices[0].message.content}]

        begun = await ask([], "Guess.")
        _, second = [await ask(begun, "Again!", seed=seed) for seed in (1, 2)]
        first, again = (await session.trajectory()).sequences
        await session.set_reward(0.5, sequences={first.id: 0.25, again.id: 0.75})
        await ask(second, "Once more!")


async def test_a_reward_of_a_sequence_that_went_on_elsewhere_is_not_used(rig):
    failed = await rollouts(rewarding_too_early, rows="longest").one(rig.client, SAMPLE, sampling={}, group="g")
    assert (failed.kind, failed.detail) == ("incomplete", "reward-outdated")
    session = rig.client.session(failed.session)
    state = await session.state()
    assert (state.complete, state.valid, [incident.kind for incident in state.incidents]) == (False, False, ["reward-outdated"])
    assert [one for one in await rig.client.sessions() if one.session == failed.session] == [state]
    async with rig.http.get(f"{rig.url}/tokencache/v1/summaries", params={"incident": "reward-outdated"}) as answer:
        assert [one["session"] for one in (await answer.json())["sessions"]] == [failed.session]
    assert (await rig.client.queue()).invalid == 1
    trajectory = await session.trajectory()
    await session.set_reward(0.5, sequences={one.id: 0.25 for one in trajectory.sequences})
    again = await session.trajectory()
    assert (again.valid, [one.reward for one in again.sequences]) == (True, [0.25] * len(again.sequences))


async def test_rows_are_chosen_among_those_of_a_selected_model(rig):
    rig.engine.weights.adapters["tuned"] = "/tuned"

    async def both(session, sample):
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
            await model.chat.completions.create(model="tuned", messages=[{"role": "user", "content": "T"}])
        return await branching(session, sample)

    done = await rollouts(both, lengths={"model": "tuned"}).one(rig.client, SAMPLE, sampling={}, group="g")
    assert not isinstance(done, FailedRollout), done
    assert [row.sequence.turns[0].model for row in done.rows.kept] == ["tuned"]


@pytest.mark.parametrize("images", [False, True])
async def test_images_whose_places_are_not_known_are_refused(images):
    """A stock engine does not report which tokens stand for an image, so they look like text."""
    async with proxied(PluginEngine(seed=7, images="stock")) as rig, AsyncClient(rig.url) as client:
        read = Fetching(form="verl", rows="longest", several=False, images=images)
        with pytest.raises(RowsError, match="did not report which tokens stand for them"):
            await Rollouts(play=looking, read=read, run="r").one(client, {"width": 28}, sampling={}, group="g")


async def test_a_reward_may_be_stored_by_other_means(rig):
    async def rewarding(session, sample):
        await without_reward(session, sample)
        await session.set_reward(0.25, components={"tests": 1.0})

    done = await rollouts(rewarding, rows="longest").one(rig.client, SAMPLE, sampling={}, group="g")
    assert (done.trajectory.reward, done.trajectory.reward_components) == (0.25, {"tests": 1.0})


async def broken_reward(session, sample):
    await play(session, sample)
    return float("nan")


async def out_of_memory(session, sample):
    await play(session, sample)
    await session.finish(failed="sandbox", detail="out of memory")
    return 0.0


async def cut_off(session, sample):
    await play(session, sample)
    await session.finish(failed="sandbox", detail="out of memory")
    raise RuntimeError("the sandbox is gone")


async def silent(session, sample):
    return 0.0


@pytest.mark.parametrize(
    ("harness", "kind", "detail"),
    [
        (failing, "harness", "RuntimeError: the harness broke"),
        (sometimes(SystemExit(3)), "harness", "SystemExit: 3"),
        (sometimes(asyncio.CancelledError("its own")), "harness", "CancelledError: its own"),
        (broken_reward, "harness", "its reward was refused"),
        (out_of_memory, "sandbox", "out of memory"),
        (cut_off, "sandbox", "out of memory"),
        (silent, "harness", "no call was recorded"),
    ],
)
async def test_a_failed_rollout_says_what_failed_and_its_session_stays(rig, harness, kind, detail):
    failed = await rollouts(harness, delete=True).one(rig.client, SAMPLE, sampling={}, group="g")
    (state,) = await rig.client.sessions()
    assert failed == FailedRollout(state.session, state.outcome, state.outcome_detail)
    assert (state.outcome, state.valid, state.state != "open") == (kind, False, True)
    assert detail in state.outcome_detail


async def test_one_failed_rollout_ends_no_other(rig):
    made = rollouts(sometimes(None, RuntimeError("no such program")))
    done = await made.step(rig.client, [("a", SAMPLE), ("a", SAMPLE), ("a", {"secret": 1})], {})
    assert [one.trajectory.reward for one in done if not isinstance(one, FailedRollout)] == [0.75, 1.0]
    assert done[1].kind == "harness"
    assert sorted(state.outcome for state in await rig.client.sessions(group="r-a")) == ["harness", "ok", "ok"]
    report = await rig.client.report("r")
    assert (report.valid, report.failures, report.groups[0].size) == (2, {"harness": 1}, 3)


async def test_a_failed_rollout_is_played_again_in_a_session_that_names_the_one_before(rig):
    made = rollouts(sometimes(OSError("a"), OSError("b")), retries=2, options={"metadata": {"mine": 1}})
    done = await made.one(rig.client, SAMPLE, sampling={}, group="g")
    assert done.trajectory.reward == 0.75
    states = {state.session: state for state in await rig.client.sessions(group="r-g")}
    before = [states[done.trajectory.session]]
    while name := before[-1].metadata.get("retry_of"):
        before.append(states[name])
    assert [state.outcome_detail for state in before] == ["", "OSError: b", "OSError: a"]
    assert [state.metadata.get("mine") for state in before] == [1, 1, 1]
    report = await rig.client.report("r")
    assert (report.rollouts, report.valid, report.failed, report.retried) == (1, 1, 0, 2)


async def test_too_many_failures_end_the_step_and_are_counted_by_kind(rig):
    waiting = asyncio.Event()

    async def harness(session, sample):
        if sample == "wait":
            await play(session, SAMPLE)
            waiting.set()
            await asyncio.Event().wait()
        await waiting.wait()
        if sample == "out of memory":
            await session.finish(failed="sandbox", detail=sample)
        raise RuntimeError("no such program")

    samples = [("a", sample) for sample in ("wait", "raise", "out of memory", "raise")]
    with pytest.raises(TooManyFailuresError, match=r"3 of 4 rollouts failed, and 2 may .*harness 2 \(session .*no such program") as raised:
        await rollouts(harness, max_failures=2).step(rig.client, samples, {})
    assert "sandbox 1 (session " in str(raised.value)
    states = {state.session: state for state in await rig.client.sessions()}
    assert {one.session for one in raised.value.failures} < set(states)
    (cancelled,) = [state for state in states.values() if state.outcome == "canceled"]
    (incident,) = cancelled.incidents
    assert (incident.kind, incident.hole, incident.at) == ("rollout-canceled", False, cancelled.finished)
    assert "the trainer cancelled" in cancelled.outcome_detail == incident.detail
    assert (cancelled.state, cancelled.valid) == ("finished", False)


async def test_a_step_in_which_all_rollouts_failed_is_an_error_unless_that_is_allowed(rig):
    with pytest.raises(TooManyFailuresError, match="2 of 2 rollouts failed"):
        await rollouts(failing).step(rig.client, [("a", SAMPLE)] * 2, {})
    done = await rollouts(failing, max_failures=2).step(rig.client, [("a", SAMPLE)] * 2, {})
    assert [one.kind for one in done] == ["harness", "harness"]


async def test_a_proxy_that_is_gone_is_a_failure_and_a_wrong_setup_an_error():
    async with AsyncClient("http://127.0.0.1:1") as client:
        assert (await rollouts(play).one(client, SAMPLE, sampling={}, group="g"))[:2] == ("", "proxy")
    async with proxied(guessing_engine(), admin_key="secret") as made, AsyncClient(made.url, "wrong") as client:
        with pytest.raises(ExceptionGroup) as raised:
            await rollouts(play).step(client, [("a", SAMPLE)], {})
        assert raised.group_contains(UnauthorizedError)
    async with proxied(guessing_engine()) as made, AsyncClient(made.url) as client:
        with pytest.raises(RowsError, match="one is allowed"):
            await rollouts(branching, rows="single").one(client, SAMPLE, sampling={}, group="g")


async def test_a_call_that_does_not_end_leaves_the_session_unsealed(rig):
    rig.engine.replies.script = lambda _request: iter(lambda: "and so on ", None)
    calls = []

    async def hasty(session, sample):
        calls.append(asyncio.create_task(branching(session, sample)))
        while not (await session.state()).open_calls:  # noqa: ASYNC110 - it is asked over HTTP
            await asyncio.sleep(0.01)

    failed = await rollouts(hasty, delete=True, timeout=0.1).one(rig.client, SAMPLE, sampling={}, group="g")
    (state,) = await rig.client.sessions()
    assert (failed.kind, state.outcome, state.state, len(state.open_calls)) == ("timeout", "timeout", "finished", 1)
    calls[0].cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_rollout_that_was_read_is_good_although_its_session_cannot_be_deleted(rig, caplog):
    async def read(session, trajectory):
        await session.delete()
        return trajectory

    done = await Rollouts(play=play, read=read, run="r", delete=True, retries=1).one(rig.client, SAMPLE, sampling={}, group="g")
    assert (type(done), done.valid) == (Trajectory, True)
    assert "is not deleted" in caplog.text


async def test_sessions_are_deleted_only_on_request(rig):
    await rollouts(play).one(rig.client, SAMPLE, sampling={}, group="g")
    await rollouts(play, delete=True).one(rig.client, SAMPLE, sampling={}, group="g")
    assert len(await rig.client.sessions()) == 1


def test_functions_are_found_by_name():
    assert load_play("examples.integrations.guessing:play") is play
    assert load_play(play) is play
    for name in ("examples.integrations.guessing:missing", "nowhere:play", "examples.integrations.guessing"):
        with pytest.raises((ValueError, TypeError), match="play: "):
            load_play(name)

"""Checks of the life cycle, definitions, settings, labels and rewards of sessions."""

import asyncio

from msgspec.structs import replace

from tests.store.conformance.support import LONG, build, info_of, name_of, open_calls, raises, record, same, true
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.outcome import LatestTurn, Outcome
from tokencache.core.session import REWARDS_KEPT, Budget, LabelChanges, Labels, Reward, SessionSettings, SessionStage
from tokencache.store.base import (
    Entry,
    OutcomeConflictError,
    SealOutcome,
    SessionDeletedError,
    SessionExistsError,
    SessionFinishedError,
    SessionSealedError,
    SettingsChangedError,
    SettingsConflictError,
    Store,
)

FULL = SessionSettings("codex", {"gpt-*": "ü", "*": "x"}, {"temperature": 1.0, "top_p": None}, Budget(calls=3, tokens=0, seconds=1.5), "me")
OTHER = SessionSettings("codex", sampling={"temperature": 0.5}, deadline=2e9)
LABELS = Labels("naïve }{", {"a": [1, 2.5, None, {"b": "☕"}], "big": 2**70}, ("x", "y z"))


async def check_life_cycle(store: Store) -> None:
    """A session is open, then finished, then sealed. It is sealed only if it is finished and no call is in flight."""
    session = name_of("life")
    same((await store.finish(session), await store.seal(session)), (False, SealOutcome.MISSING), "finish and seal of a missing session")
    epoch = (await store.begin(session, "k1", [], fingerprint=b"same")).epoch
    info = await info_of(store, session)
    same((info.state, info.finished, info.epoch), (SessionStage.OPEN, None, epoch), "state of a new session")
    same(await store.seal(session), SealOutcome.UNFINISHED, "seal of an unfinished session with a call")
    same(await store.finish(session), True, "finish")
    finished = (await info_of(store, session)).finished
    same(await store.finish(session), True, "finish again")
    info = await info_of(store, session)
    same((info.state, info.sealed, info.finished), (SessionStage.FINISHED, False, finished), "state of a finished session")
    true(info.created <= finished, "time of finishing")
    for join in ("never", "any"):
        async with raises(SessionFinishedError, "begin in a finished session"):
            await store.begin(session, "k2", [], fingerprint=b"same", join=join)
    same(await open_calls(store, session), {"k1"}, "a refused call was not opened")
    same(await store.seal(session), SealOutcome.CALLS_IN_FLIGHT, "seal while a call is in flight")
    await store.commit(session, epoch, "k1", [build("a").entry])
    same(await store.seal(session), SealOutcome.SEALED, "seal")
    same((await store.seal(session), await store.seal(session, force=True)), (SealOutcome.SEALED, SealOutcome.SEALED), "seal again")
    same(await store.finish(session), True, "finish of a sealed session")
    info = await info_of(store, session)
    same((info.state, info.sealed, info.finished, info.turns), (SessionStage.SEALED, True, finished, 1), "state of a sealed session")
    same(info.incidents, (), "incidents of a session that was sealed in order")
    async with raises(SessionSealedError, "begin in a sealed session"):
        await store.begin(session, "k3", [])


async def _only_incident(store: Store, session: str) -> Incident:
    incidents: tuple[Incident, ...] = (await info_of(store, session)).incidents
    same(len(incidents), 1, "number of incidents")
    return incidents[0]


async def check_forced_seal(store: Store) -> None:
    """A forced seal reports what it cuts off, once. Calls in flight may still commit."""
    session = name_of("forced")
    epoch = (await store.begin(session, "k1", [])).epoch
    await store.begin(session, "k2", [])
    same(await store.seal(session, force=True, at=1.5), SealOutcome.SEALED, "forced seal")
    same(await store.seal(session, force=True, at=2.5), SealOutcome.SEALED, "forced seal again")
    incident = await _only_incident(store, session)
    same((incident.kind, incident.hole, incident.at), (IncidentKind.SEALED_EARLY, True, 1.5), "incident")
    true("not finished" in incident.detail, "the incident says that the session was not finished")
    true("2 calls" in incident.detail, "the incident says how many calls were in flight")
    await store.commit(session, epoch, "k1", [build("a").entry])
    await store.settle(session, epoch, "k2")
    same((await info_of(store, session)).turns, 1, "turns of late commits")
    complete, busy = name_of("complete"), name_of("busy")
    await record(store, complete, build("a"))
    await store.finish(complete)
    await store.seal(complete, force=True)
    same((await info_of(store, complete)).incidents, (), "incidents of a forced seal that cut off nothing")
    await store.begin(busy, "k", [])
    await store.finish(busy)
    await store.seal(busy, force=True)
    incident = await _only_incident(store, busy)
    true("not finished" not in incident.detail and "1 call " in incident.detail, "what a forced seal of a finished session cuts off")


async def check_engine(store: Store) -> None:
    """A session has the engine of its newest turn that names one, until it is finished or sealed."""
    session, forced, url = name_of("engine"), name_of("engine-forced"), "http://ünusual:1/a b"
    begun = await store.begin(session, "k1", [])
    same((begun.engine, (await info_of(store, session)).engine), ("", ""), "engine of a new session")
    await store.commit(session, begun.epoch, "k1", [build("a").entry], engine="http://first:1")
    same((await store.begin(session, "k2", [])).engine, "http://first:1", "engine of the next call")
    await store.commit(session, begun.epoch, "k2", [build("b").entry], engine=url)
    await store.begin(session, "k3", [])
    await store.commit(session, begun.epoch, "k3", [build("c").entry])
    begun = await store.begin(session, "k4", [])
    same((begun.engine, (await info_of(store, session)).engine), (url, url), "engine after a turn that names none")
    await store.settle(session, begun.epoch, "k4")
    await store.begin(session, "k5", [])
    await store.finish(session)
    same((await info_of(store, session)).engine, "", "engine of a finished session")
    await store.commit(session, begun.epoch, "k5", [build("d").entry], engine=url)
    same((await info_of(store, session)).engine, "", "engine after a commit in a finished session")
    begun = await store.begin(forced, "k1", [])
    await store.commit(forced, begun.epoch, "k1", [build("a").entry], engine=url)
    await store.begin(forced, "k2", [])
    await store.seal(forced, force=True)
    await store.commit(forced, begun.epoch, "k2", [build("b").entry], engine=url)
    same((await info_of(store, forced)).engine, "", "engine of a sealed session")


async def check_outcome(store: Store) -> None:
    """The first outcome that is given stays. One of another kind is refused, and so is a first one once the session is sealed."""
    session, late, plain = name_of("outcome"), name_of("late"), name_of("plain")
    failed = Outcome("my-word", "naïve }{ ☕\nx")
    same(await store.finish(session, failed), False, "finish of a missing session")
    await record(store, session, build("a"))
    info = await info_of(store, session)
    same((info.outcome, info.latest), (None, LatestTurn.of(build("a").turn)), "outcome and newest turn of an open session")
    same(await store.finish(session, failed), True, "finish with an outcome")
    for again in (failed, Outcome("my-word", "other"), None):
        same(await store.finish(session, again), True, "finish again")
    for other in ("ok", "engine"):
        async with raises(OutcomeConflictError, "another outcome"):
            await store.finish(session, Outcome(other))
    await store.seal(session)
    same(await store.finish(session, failed), True, "the same outcome of a sealed session")
    same((await info_of(store, session)).outcome, failed, "outcome")
    await store.define(late, SessionSettings(), Labels())
    await store.finish(late)
    same((await info_of(store, late)).outcome, None, "outcome of a session that was finished without one")
    await store.finish(late, Outcome("ok"))
    same((await info_of(store, late)).outcome, Outcome("ok"), "an outcome that came later")
    await store.define(plain, SessionSettings(), Labels())
    await store.finish(plain)
    await store.seal(plain)
    async with raises(OutcomeConflictError, "a first outcome of a sealed session"):
        await store.finish(plain, failed)
    same(((await info_of(store, plain)).outcome, (await info_of(store, plain)).latest), (None, None), "outcome of a sealed session")
    refused = name_of("refused")
    await record(store, refused, build("a"))
    await store.seal(refused, force=True)
    async with raises(OutcomeConflictError, "an outcome of a session that was sealed by force"):
        await store.finish(refused, failed)
    same((await info_of(store, refused)).finished, None, "a refused finish changes nothing")


async def check_watched(store: Store) -> None:
    """A watched session is overdue once its time has passed, whether or not it exists. It is watched until that is taken back."""
    due, later, again = name_of("due }{ ü"), name_of("later"), name_of("again")
    for session, seconds in ((due, 0.0), (later, LONG), (again, LONG), (again, -1.0)):
        await store.watch(session, seconds)
    for _ in range(2):
        same({due, again} & set((await store.overdue()).sessions), {due, again}, "overdue")
        true(later not in (await store.overdue()).sessions, "a session whose time has not passed")
    await store.watch(again, LONG)
    for session in (due, later, again, name_of("unknown")):
        await store.unwatch(session)
    same({due, later, again} & set((await store.overdue()).sessions), set(), "overdue after that was taken back")
    await store.watch(later, 0.0)
    await store.begin(again, "k", [])
    now = (await store.overdue()).now
    true(0.0 <= now - (await info_of(store, again)).used < LONG, "the time is that of the clock by which sessions are used")
    true(later in (await store.overdue()).sessions, "a session whose time was set anew")
    await store.unwatch(later)


async def check_definition(store: Store) -> None:
    """A definition creates a session with settings and labels, and lifts a tombstone. A session that exists is joined only on request."""
    session, called = name_of("defined"), name_of("called")
    same(await store.settings(session), None, "settings of a missing session")
    same(await store.define(session, FULL, LABELS), True, "define")
    info = await info_of(store, session)
    same((info.settings, info.labels, info.state, info.turns), (FULL, LABELS, SessionStage.OPEN, 0), "state of a defined session")
    same((info.harness, await store.settings(session)), ("codex", FULL), "harness, and settings read on their own")
    async with raises(SessionExistsError, "define again"):
        await store.define(session, FULL, LABELS)
    same(await store.define(session, FULL, Labels(), exist_ok=True), False, "join with equal settings")
    same(await store.define(session, SessionSettings(), Labels(), exist_ok=True), False, "join without settings")
    same((await info_of(store, session)).labels, LABELS, "labels after joining without labels")
    same(await store.define(session, SessionSettings(), Labels(tags=("z",)), exist_ok=True), False, "join with labels")
    same((await info_of(store, session)).labels, Labels(LABELS.group, LABELS.metadata, ("z",)), "labels after joining with some")
    for options in ({"exist_ok": True}, {"adopt": True}):
        try:
            await store.define(session, OTHER, Labels("lost"), **options)
        except SettingsConflictError as why:
            same((why.session, set(why.members)), (session, {"models", "sampling", "budget", "tenant", "deadline"}), "conflict")
        else:
            raise AssertionError("join with other settings: no SettingsConflictError")
    info = await info_of(store, session)
    same((info.settings, info.labels.group), (FULL, LABELS.group), "state after a conflict")
    await record(store, called, build("a"))
    async with raises(SessionExistsError, "define of a session that has turns"):
        await store.define(called, SessionSettings(), Labels())
    async with raises(SettingsConflictError, "join of a session without settings, with settings"):
        await store.define(called, OTHER, Labels(), exist_ok=True)
    same(await store.define(called, OTHER, Labels(), adopt=True), False, "adopt settings")
    info = await info_of(store, called)
    same((info.settings, info.turns), (OTHER, 1), "state after adopting settings")
    same(await store.define(name_of("new"), OTHER, Labels(), adopt=True), True, "a definition that may adopt creates a missing session")
    await store.delete(session)
    same(await store.define(session, OTHER, Labels()), True, "define of a deleted session")
    info = await info_of(store, session)
    same((info.settings, info.labels), (OTHER, Labels()), "state of a session that was defined again")
    true((await store.begin(session, "k", [], settings=OTHER.digest)).epoch == info.epoch, "a call of the session that was defined again")


async def check_settings(store: Store) -> None:
    """A call opens only if it is served by the session's own settings."""
    plain, defined = name_of("plain"), name_of("settings")
    await store.define(defined, FULL, Labels())
    for session, wrong, right in ((defined, b"", FULL), (defined, OTHER.digest, FULL), (plain, FULL.digest, SessionSettings())):
        try:
            await store.begin(session, "k", [], settings=wrong)
        except SettingsChangedError as why:
            same(why.settings, right, "the settings that the session has")
        else:
            raise AssertionError("begin with other settings: no SettingsChangedError")
    same(await store.session(plain), None, "a refused call creates no session")
    same((await info_of(store, defined)).open_calls, (), "a refused call is not opened")
    same((await store.begin(defined, "k", [], settings=FULL.digest)).calls, 1, "calls")
    same((await store.begin(plain, "k", [])).calls, 1, "calls of a session without settings")
    same(await store.settings(plain), SessionSettings(), "settings of a session without settings")


async def check_concurrent_definitions(store: Store) -> None:
    """Of concurrent definitions one creates the session; its settings hold."""
    session = name_of("race")
    offers = [SessionSettings(tenant=str(n)) for n in range(20)]
    results = await asyncio.gather(*(store.define(session, offer, Labels(offer.tenant)) for offer in offers), return_exceptions=True)
    won = [offer for offer, result in zip(offers, results, strict=True) if result is True]
    same(len(won), 1, "definitions that created the session")
    same({type(result) for result in results if result is not True}, {SessionExistsError}, "results of the others")
    info = await info_of(store, session)
    same((info.settings, info.labels.group), (won[0], won[0].tenant), "settings and labels")


async def check_labels(store: Store) -> None:
    """Labels are replaced member by member, in any state."""
    session = name_of("labels")
    same(await store.set_labels(session, LabelChanges("g")), False, "labels of a missing session")
    same(await store.session(session), None, "setting labels creates nothing")
    await record(store, session, build("a"))
    same((await info_of(store, session)).labels, Labels(), "labels at first")
    same(await store.set_labels(session, LABELS.changes), True, "set labels")
    same((await info_of(store, session)).labels, LABELS, "labels")
    await store.seal(session, force=True)
    await store.set_labels(session, LabelChanges(metadata={"c": 1}))
    same((await info_of(store, session)).labels, Labels(LABELS.group, {"c": 1}, LABELS.tags), "metadata replaced")
    await store.set_labels(session, LabelChanges("", {}, ()))
    same((await info_of(store, session)).labels, Labels(), "labels removed")
    await store.set_labels(session, LabelChanges())
    await store.set_labels(session, LabelChanges("g"))
    await store.delete(session, reuse=True)
    await store.begin(session, "k", [])
    same((await info_of(store, session)).labels, Labels(), "labels of the next epoch")


async def check_rewards(store: Store) -> None:
    """Rewards are set in any state, the last one counts, and the newest ones are kept."""
    session = name_of("rewards")
    same((await store.add_reward(session, Reward(1.0)), await store.rewards(session)), (False, []), "rewards of a missing session")
    same(await store.session(session), None, "setting a reward creates nothing")
    await record(store, session, build("a"))
    info = await info_of(store, session)
    same((info.reward, info.rewards, await store.rewards(session)), (None, 0, []), "no reward")
    first = Reward(None, {"ü": -1.5}, {"a": 1e300}, {"s": 0.0}, 1.5)
    same(await store.add_reward(session, first), True, "set a reward")
    await store.seal(session, force=True)
    await store.add_reward(session, Reward(0.1))
    info = await info_of(store, session)
    same((info.reward, info.rewards), (Reward(0.1), 2), "the newest reward")
    same(await store.rewards(session), [first, Reward(0.1)], "all rewards")
    for n in range(REWARDS_KEPT):
        await store.add_reward(session, Reward(float(n)))
    same([one.reward for one in await store.rewards(session)], list(range(REWARDS_KEPT)), "rewards that are kept")
    info = await info_of(store, session)
    same((info.reward, info.rewards), (Reward(REWARDS_KEPT - 1.0), REWARDS_KEPT + 2), "the newest reward, and how many there were")


async def check_deleted_definition(store: Store) -> None:
    """Nothing of the new methods creates or changes a deleted session, except a definition."""
    session = name_of("buried")
    await store.define(session, FULL, LABELS)
    await store.delete(session)
    done = [await store.finish(session), await store.set_labels(session, LabelChanges("g")), await store.add_reward(session, Reward(1.0))]
    same(done, [False] * 3, "changes of a deleted session")
    same((await store.seal(session, force=True), await store.settings(session)), (SealOutcome.MISSING, None), "seal and settings")
    same(await store.rewards(session), [], "rewards")
    async with raises(SessionDeletedError, "begin in a deleted session"):
        await store.begin(session, "k", [], settings=FULL.digest)


async def check_summary(store: Store) -> None:
    """The state of a session has the sampled tokens and the time of all its turns, and facts of the newest one."""
    session = name_of("summary")
    one, two = (build(name, reply=range(n)) for name, n in (("a", 3), ("b", 4)))
    await record(store, session, one)
    info = await info_of(store, session)
    same((info.sampled, info.model, info.harness), (3, one.turn.model, one.turn.harness), "after one turn")
    await record(store, session, two)
    same((await info_of(store, session)).sampled, 7, "tokens sampled in two turns")
    version = {"version": "v3", "start": 0, "end": 2}
    turn = replace(build("c").turn, seconds=1.25, versions=[version], version_source="trainer")
    begun = await store.begin(session, "k", [])
    tokens = build("c").entry.tokens
    await store.commit(session, begun.epoch, "k", [Entry(turn, tokens), Entry(replace(turn, id="d"), tokens)])
    info = await info_of(store, session)
    same(info.call_ms, 1250, "time of a call with two turns")
    found = info.latest
    same(found and (found.id, found.prompt_tokens, found.completion_tokens), ("d", 3, 2), "the newest turn")
    same(found and (found.versions, found.version_source), ([version], "trainer"), "the policy version of the newest turn")
    for name, created in (("first", 5.0), ("late", 4.5), ("same", 5.0), ("later", 4.75)):
        await store.commit(session, begun.epoch, name, [Entry(replace(build(name).turn, created=created), build(name).entry.tokens)])
        same(
            (await info_of(store, session)).latest.id, {"late": "first", "later": "same"}.get(name, name), "the turn whose call began last"
        )
    used = await store.usage()
    same(used.share is None or used.share >= 0, True, "a share of a limit")
    same(used.used >= 0, True, "bytes")

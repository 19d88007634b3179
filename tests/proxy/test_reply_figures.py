"""An engine's reply that was spoilt on its way: what is not certain is not trained, and the session says so."""

import contextlib
import copy
import itertools
import json
import random

import aiohttp
import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, assembled, echo, events, proxied, user
from tests.proxy.spoiling import SpoilingGateway, changed, unproven
from tests.support.pairwise import each
from tokencache.engine import figures
from tokencache.engine.figures import Finding
from tokencache.engine.reply import Reply
from tokencache.testing import Fault, SimulatedEngine

TEXT = "<think>\nr\n</think>\n\nGo, then say so."
ASK = [user("EPISODE:demo")]
PROMPT = {"prompt": "Once upon", "max_tokens": 12}
TEXTS = "/v1/completions"


def made(**options):
    return SimulatedEngine(episodes={**EPISODES, "demo": [TEXT] * 8}, seed=7, drift=0, **options)


@contextlib.asynccontextmanager
async def spoilt(**settings):
    """A rig with a gateway before its engine, which works well so far."""
    engine = made(**settings.pop("options", {}))
    async with engine.serve() as up:
        gateway = SpoilingGateway(up)
        async with gateway.serve() as url, proxied(made(), upstream=url, **settings) as rig:
            await rig.proxy.engine.model()
            rig.engine = engine
            yield rig, gateway


@pytest.fixture
async def both():
    async with spoilt() as found:
        yield found


async def asked(rig, session, *, stream=False, path=CHAT, messages=ASK, **more):
    """The bytes of an answer."""
    body = {"model": "sim", "stream": stream, **({"messages": messages} if path == CHAT else PROMPT), **more}
    async with rig.http.post(rig.url + path, json=body, headers={HEADER: session}) as answer:
        return await answer.read()


async def recorded(rig, session):
    """A session's export, the kinds of its incidents, and the number of trained tokens of each sequence."""
    exported = await rig.exported(session)
    assert not unproven(exported, rig.ground_truth(session))
    kinds = {incident["kind"] for incident in exported["incidents"]}
    return exported, kinds, [sum(sequence["loss_mask"]) for sequence in exported["sequences"]]


def one(path, change):
    """Change a member of a whole reply."""
    return lambda sent: [changed(sent[0], path, change)]


IDS, LOGPROBS = "choices.0.token_ids", "choices.0.logprobs.content"
WHOLE = {
    "ids missing": (one(IDS, lambda _: ...), "no-token-ids", [0]),
    "ids null": (one(IDS, lambda _: None), "no-token-ids", [0]),
    "ids empty": (one(IDS, lambda _: []), "no-token-ids", [0]),
    "ids negative": (one(IDS, lambda ids: [-1] * len(ids)), "inconsistent-reply", [0]),
    "one id negative": (one(IDS, lambda ids: [*ids[:3], -2, *ids[4:]]), "inconsistent-reply", [0]),
    "an id that the model does not have": (one(IDS, lambda ids: [*ids[:-1], 10**6]), "inconsistent-reply", [0]),
    "an id of 33 bits": (one(IDS, lambda ids: [2**32, *ids[1:]]), "inconsistent-reply", [0]),
    "an id of 65 bits": (one(IDS, lambda ids: [*ids[:-1], 2**64]), "inconsistent-reply", [0]),
    "an id lost": (lambda sent: one(IDS, lambda ids: ids[1:])(one(LOGPROBS, lambda all_: all_[1:])(sent)), "inconsistent-reply", [0]),
    "an id twice": (
        lambda sent: one(IDS, lambda ids: [ids[0], *ids])(one(LOGPROBS, lambda all_: [all_[0], *all_])(sent)),
        "inconsistent-reply",
        [0],
    ),
    "another count": (one("usage.completion_tokens", lambda count: count + 1), "inconsistent-reply", [0]),
    "no count": (one("usage", lambda _: ...), "inconsistent-reply", [0]),
    "another count of the prompt": (one("usage.prompt_tokens", lambda count: count - 1), "inconsistent-reply", []),
    "an id of the prompt lost": (one("prompt_token_ids", lambda ids: ids[:-1]), "inconsistent-reply", []),
    "an id of the prompt negative": (one("prompt_token_ids", lambda ids: [-5, *ids[1:]]), "no-token-ids", []),
    "an id of the prompt that the model does not have": (one("prompt_token_ids", lambda ids: [10**6, *ids[1:]]), "inconsistent-reply", []),
    "another index": (one("choices.0.index", lambda _: 1), "inconsistent-reply", [0]),
    "the end missing": (one("choices.0.finish_reason", lambda _: None), "unfinished-reply", [15]),
    "ids that are text": (one(IDS, lambda ids: [*map(str, ids)]), "unreadable-reply", []),
}


@pytest.mark.parametrize("name", WHOLE)
async def test_a_whole_reply_with_wrong_figures_is_a_hole(both, name):
    (rig, gateway), (spoil, kind, trained) = both, WHOLE[name]
    gateway.spoil = spoil
    said = json.loads(await asked(rig, "s"))["choices"][0]["message"]
    assert said["content"].strip() == "Go, then say so."  # what the client saw stays what it was
    exported, kinds, sums = await recorded(rig, "s")
    assert (exported["complete"], sums) == (False, trained)
    assert kind in kinds
    gateway.spoil = None
    await asked(rig, "s", messages=[*ASK, echo(said), user("and?")])
    assert (await rig.turns("s"))[-1]["match"] in {"root", "plain"}  # nothing continues what is not certain


UNUSABLE = {
    "above 0": lambda entries: [{**entries[0], "logprob": 0.5}, *entries[1:]],
    "null": lambda entries: [{**entries[0], "logprob": None}, *entries[1:]],
    "without its value": lambda entries: [{"token": "x"}, *entries[1:]],
    "one too few": lambda entries: entries[1:],
    "one too many": lambda entries: [*entries, entries[0]],
    "none": lambda _: None,
}


@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_log_probabilities_are_not_trained(both, name, stream):
    """In a stream only those of one event in the middle are wrong."""
    rig, gateway = both

    def spoil(sent):
        found = deltas(sent)
        return [changed(event, LOGPROBS, UNUSABLE[name]) if n == found[len(found) // 2] else event for n, event in enumerate(sent)]

    gateway.spoil = spoil
    await asked(rig, "s", stream=stream)
    exported, kinds, sums = await recorded(rig, "s")
    assert (exported["complete"], sums) == (True, [0])
    assert kinds == {"no-logprobs"}
    assert exported["sequences"][0]["turns"][0]["marks"] == ["no-logprobs"]


async def test_log_probabilities_that_belong_to_other_tokens_are_not_trained(both):
    """One event has one too few, another one too many: their number is right, and their tokens are not."""
    rig, gateway = both

    def spoil(sent):
        few, many, *_ = deltas(sent)
        change = {few: UNUSABLE["one too few"], many: UNUSABLE["one too many"]}
        return [changed(event, LOGPROBS, change[n]) if n in change else event for n, event in enumerate(sent)]

    gateway.spoil = spoil
    await asked(rig, "s", stream=True)
    exported, kinds, sums = await recorded(rig, "s")
    assert (exported["complete"], kinds, sums) == (True, {"no-logprobs"}, [0])


async def test_a_log_probability_just_above_0_is_rounding(both):
    rig, gateway = both
    gateway.spoil = one(LOGPROBS, lambda all_: [{**entry, "logprob": 1e-6} for entry in all_])
    await asked(rig, "s")
    exported = await rig.exported("s")
    assert sum(exported["sequences"][0]["loss_mask"]) == 15


def chunk(**members):
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "sim", **members}


def late(ids=(1, 2, 3), text="MORE"):
    entries = [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []} for _ in ids]
    choice = {"index": 0, "delta": {"content": text}, "token_ids": list(ids), "logprobs": {"content": entries}, "finish_reason": None}
    return chunk(choices=[choice])


def deltas(sent):
    """The positions of the events with ids."""
    return [n for n, event in enumerate(sent) if isinstance(event, dict) and any(c.get("token_ids") for c in event["choices"])]


def without(n):
    return lambda sent: [event for at, event in enumerate(sent) if at != deltas(sent)[n]]


def twice(n):
    return lambda sent: [copied for at, event in enumerate(sent) for copied in [event] * (2 if at == deltas(sent)[n] else 1)]


def to_the_end(n):
    def move(sent):
        rest = without(n)(sent)
        return [*rest[:-2], sent[deltas(sent)[n]], *rest[-2:]]

    return move


def half(n):
    return lambda sent: [json.dumps(event).encode()[:-20] if at == deltas(sent)[n] else event for at, event in enumerate(sent)]


STREAMED = {
    "an event lost": (without(5), "inconsistent-reply", [0]),
    "the first lost": (without(0), "inconsistent-reply", [0]),
    "the last lost": (without(-1), "upstream-broke", [0]),
    "an event twice": (twice(5), "inconsistent-reply", [0]),
    "the last twice": (twice(-1), "inconsistent-reply", [0]),
    "an event after the finish reason": (to_the_end(5), "inconsistent-reply", [0]),
    "one cannot be read": (half(5), "unreadable-reply", [5]),
    "the usage lost": (lambda sent: [*sent[:-2], sent[-1]], "inconsistent-reply", [0]),
    "the usage wrong": (
        lambda sent: [*sent[:-2], changed(sent[-2], "usage.completion_tokens", lambda n: n + 1), sent[-1]],
        "inconsistent-reply",
        [0],
    ),
    "the prompt lost": (lambda sent: sent[1:], "no-token-ids", []),
    "the end before the rest": (lambda sent: [*sent[:6], sent[-1], *sent[6:-1]], "upstream-broke", [5]),
    "the ids of an event lost": (
        lambda sent: [changed(e, IDS, lambda _: []) if n == deltas(sent)[4] else e for n, e in enumerate(sent)],
        "inconsistent-reply",
        [0],
    ),
    "a lone event of another choice": (
        lambda sent: [changed(e, "choices.0.index", lambda _: 1) if n == deltas(sent)[4] else e for n, e in enumerate(sent)],
        "inconsistent-reply",
        None,
    ),
}


@pytest.mark.parametrize(("usage", "name"), each([{}, {"stream_options": {"include_usage": True}}], [*STREAMED]), ids=json.dumps)
async def test_a_stream_with_wrong_figures_is_a_hole(both, name, usage):
    (rig, gateway), (spoil, kind, trained) = both, STREAMED[name]
    gateway.spoil = spoil
    with contextlib.suppress(OSError, aiohttp.ClientError):  # a stream without an end is broken off
        await asked(rig, "s", stream=True, **usage)
    exported, kinds, sums = await recorded(rig, "s")
    assert not exported["complete"]
    assert kind in kinds
    assert trained is None or sums == trained


async def test_nothing_after_the_end_is_recorded_or_sent_on(both):
    rig, gateway = both
    gateway.spoil = lambda sent: [*sent, late(), b": comment", late(text="EVEN MORE"), b"[DONE]"]
    got = await asked(rig, "s", stream=True)
    assert b"MORE" not in got
    assert got.count(b"[DONE]") == 1
    exported, kinds, sums = await recorded(rig, "s")
    assert (exported["complete"], kinds, sums) == (True, set(), [15])
    gateway.spoil, said = None, assembled([json.loads(event) for event in events(got.decode())[:-1]])
    await asked(rig, "s", messages=[*ASK, echo(said), user("and?")])
    assert (await rig.turns("s"))[-1]["match"] == "continue"


async def test_the_running_count_says_where_a_stream_is_wrong(both):
    """A client that requests `continuous_usage_stats` has a count in each event: then order is proven, too."""
    rig, gateway = both

    def swap(sent):
        at, other = deltas(sent)[5], deltas(sent)[6]
        moved = [*sent]
        moved[at], moved[other] = sent[other], sent[at]
        return moved

    gateway.spoil = swap
    got = await asked(rig, "s", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert b'"usage"' in got
    exported, kinds, sums = await recorded(rig, "s")
    (entry,) = rig.ground_truth("s")
    assert (exported["complete"], kinds, sums) == (False, {"inconsistent-reply"}, [5])
    start, end = exported["sequences"][0]["turns"][0]["completion"]
    assert exported["sequences"][0]["token_ids"][start:end] == entry.completion_ids[:5]


async def test_the_vocabulary_is_the_models_own(both):
    """Padded vocabularies have ids that the tokenizer lacks: the limit is what the engine says of the model."""
    rig, _ = both
    model = await rig.proxy.engine.model()
    assert model.capability.vocabulary == rig.engine.tokenizer.vocabulary_size
    assert model.capability.counts


@pytest.mark.parametrize("stream", [False, True])
async def test_text_completions(both, stream):
    rig, gateway = both
    gateway.spoil = without(3) if stream else one(IDS, lambda ids: ids[1:])
    got = await asked(rig, "s", stream=stream, path=TEXTS)
    assert b'"usage":{' not in got if stream else b'"usage":{' in got
    exported, kinds, sums = await recorded(rig, "s")
    assert (exported["complete"], sums) == (False, [0])
    assert "inconsistent-reply" in kinds


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("damaged_too", [False, True])
async def test_an_agent_that_gets_token_ids_gets_only_certain_ones(stream, damaged_too):
    """It trains on them (NeMo Gym). In a stream they wait for the usage."""
    async with spoilt(return_token_id_information=True) as (rig, gateway):
        if damaged_too:
            gateway.spoil = without(3) if stream else one(IDS, lambda ids: ids[1:])
        got = await asked(rig, "s", stream=stream)
        assert (b'"generation_token_ids":[' in got) != damaged_too
        assert b'"finish_reason":"stop"' in got


VALUES = "choices.0.logprobs.token_logprobs"


@pytest.mark.parametrize(
    ("spoil", "complete", "kinds"),
    [
        (one(IDS, lambda ids: ids[1:]), False, {"inconsistent-reply"}),
        (one(IDS, lambda _: None), False, {"no-token-ids"}),
        (one(IDS, lambda ids: [*ids[:-1], -1]), False, {"inconsistent-reply"}),
        (one("usage.completion_tokens", lambda count: count - 1), False, {"inconsistent-reply"}),
        (one("choices.0.prompt_token_ids", lambda ids: ids[:-1]), False, {"inconsistent-reply"}),
        (one(VALUES, lambda values: [*values, values[0]]), True, {"no-logprobs"}),
        (one(VALUES, lambda values: [0.3, *values[1:]]), True, {"no-logprobs"}),
        (one("choices.0.logprobs", lambda _: {"tokens": 3}), True, {"no-logprobs"}),
    ],
)
async def test_a_reply_whose_message_derender_makes(spoil, complete, kinds):
    """Its tokens are from `/v1/completions`, and only a prompt that continues a turn goes there."""
    async with spoilt(options={"derenders": True}, engine_kind="completions") as (rig, gateway):
        said = await rig.say("s", ASK)
        gateway.spoil = spoil
        await asked(rig, "s", messages=[*ASK, echo(said), user("and?")])
        assert rig.engine.completions
        exported = await rig.exported("s")
        assert (exported["complete"], {incident["kind"] for incident in exported["incidents"]}) == (complete, kinds)
        assert sum(exported["sequences"][0]["loss_mask"]) == 15


# Random damage


EVENTS = ("lose or double", "move", "cut", "junk", "after the end")
MEMBERS = (
    "ids gone",
    "ids",
    "strange id",
    "no logprobs",
    "logprobs",
    "index",
    "finish",
    "usage gone",
    "usage",
    "no choices",
    "prompt",
    "error",
)
COUNTED = ("lose or double", "ids gone", "ids", "no choices")


def damaged(rng, sent, times):
    """Spoil an answer in some ways, each once. What no figure shows is left out: see `tokencache.engine.figures`."""
    kinds = rng.sample([*MEMBERS, *(EVENTS if len(sent) > 1 else ())], times)
    one_loss = next((kind for kind in kinds if kind in COUNTED), "")  # a second may make up for it
    for kind in [kind for kind in kinds if kind == one_loss or kind not in COUNTED]:
        sent = copy.deepcopy(sent)
        (damage_events if kind in EVENTS else damage_member)(rng, sent, kind)
    return sent


def damage_events(rng, sent, kind):
    at = rng.randrange(len(sent))
    match kind:
        case "lose or double":
            sent[at : at + 1] = [sent[at]] * rng.choice([0, 2])
        case "move":
            plain = at in deltas(sent)[:-1]
            event = sent.pop(at)
            sent.insert(len(sent) - rng.randrange(2) if plain else rng.randrange(len(sent) + 1), event)
        case "cut":
            raw = sent[at] if isinstance(sent[at], bytes) else json.dumps(sent[at]).encode()
            sent[at] = raw[: rng.randrange(1, len(raw))]
        case "junk":
            sent.insert(at, rng.choice([b"{}x", b"[1]", b"null", b'{"choices":3}', late(), chunk(choices=[])]))
        case _:
            sent.append(late())


def damage_member(rng, sent, kind):
    found = [(event, choice) for n in deltas(sent) for event in [sent[n]] for choice in event["choices"] if choice.get("token_ids")]
    if not found:
        return
    event, choice = rng.choice(found)
    if kind in {"usage gone", "usage"}:
        _spoil_usage(rng, sent, gone=kind == "usage gone")
    elif kind == "prompt":
        _spoil_prompt(rng, sent)
    elif kind == "logprobs":
        _spoil_logprobs(rng, choice["logprobs"])
    elif kind in {"ids gone", "ids", "strange id"}:
        _spoil_ids(rng, choice, kind)
    elif kind in {"no choices", "error"}:
        event.update({"choices": []} if kind == "no choices" else {"error": {"message": "no", "code": 500}})
    else:
        ended = choice["finish_reason"]
        new = {
            "no logprobs": ("logprobs", None),
            "index": ("index", choice["index"] + 7),
            "finish": ("finish_reason", None if ended else "stop"),
        }
        choice.update([new[kind]])


def _spoil_ids(rng, choice, kind):
    ids = choice["token_ids"]
    if kind == "ids gone":
        del choice["token_ids"]
    elif kind == "ids":
        choice["token_ids"] = rng.choice([None, [], ids[1:], ids[:-1], [*ids, ids[0]]])
    else:
        ids[rng.randrange(len(ids))] = rng.choice([-1, 10**6, 2**31, 2**40])


def _spoil_usage(rng, sent, *, gone):
    for event in sent:
        if isinstance(event, dict) and event.get("usage"):
            event["usage"]["completion_tokens"] += rng.choice([-100, 100])
            if gone:
                del event["usage"]


def _spoil_logprobs(rng, logprobs):
    if not logprobs:
        return
    values = logprobs.get("content") or logprobs.get("token_logprobs")
    if not values:
        return
    at = rng.randrange(len(values))
    kind = rng.choice(["delete", "twice", "value"])
    if kind == "delete":
        del values[at]
    elif kind == "twice":
        values.insert(at, values[at])
    else:
        value = rng.choice([0.7, None, 3, 1e300])
        values[at] = {**values[at], "logprob": value} if isinstance(values[at], dict) else value


def _spoil_prompt(rng, sent):
    for event in sent:
        if isinstance(event, dict):
            for part in [event, *event.get("choices", ())]:
                if part.get("prompt_token_ids"):
                    ids = part["prompt_token_ids"]
                    part["prompt_token_ids"] = rng.choice([None, ids[1:], [*ids, 1], [-1, *ids[1:]]])
                    return


async def attacked(rig, gateway, rng, turns):
    """Play turns whose answers are spoilt by one to three damages; returns the violations, and how many sessions stayed complete."""
    found, complete = [], 0
    for n in range(turns):
        session, path = f"s{n}", rng.choice([CHAT, CHAT, TEXTS])
        times = rng.randint(1, 3)

        gateway.spoil = lambda sent, times=times: damaged(rng, sent, times)
        with contextlib.suppress(OSError, aiohttp.ClientError):
            await asked(rig, session, stream=rng.random() < 0.6, path=path, **rng.choice([{}, {"n": 2}, {"n": 1}]))
        gateway.spoil = None
        exported = await rig.exported(session)
        found += [f"{session}: {line}" for line in unproven(exported, rig.ground_truth(session))]
        complete += exported["complete"]
    return found, complete


@pytest.mark.parametrize("policy", ["pass", "continue"])
@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.whole), pytest.param(4, marks=pytest.mark.whole)])
async def test_random_damage_is_never_trained(seed, policy):
    async with spoilt(options={"derenders": True}, aborted=policy) as (rig, gateway):
        found, complete = await attacked(rig, gateway, random.Random(seed), 60)
    assert not found
    assert complete < 40  # most damage is seen


async def test_the_check_sees_what_is_trusted(monkeypatch):
    """Without the judgement, the check finds what would be trained."""

    def trust(reply, *_, **__):
        return {index: Finding(len(choice.ids)) for index, choice in reply.choices.items()}

    monkeypatch.setattr(figures, "judge", trust)
    monkeypatch.setattr(figures, "wrong_prompt", lambda _: "")
    async with spoilt() as (rig, gateway):
        found, _ = await attacked(rig, gateway, random.Random(1), 60)
    assert len(found) > 5


@pytest.mark.parametrize("token", [-1, -(2**31) - 1, 2**31, 2**32 + 7, 2**64])
def test_without_a_known_vocabulary_an_id_that_no_model_has_is_refused(token):
    reply = Reply()
    choice = {"index": 0, "message": {"role": "assistant", "content": "Go"}, "finish_reason": "stop", "token_ids": [5, token, 6]}
    reply.add(json.dumps({"choices": [choice]}).encode())
    found = figures.judge(reply)[0]
    assert (found.tokens, found.hole) == (0, "inconsistent-reply")


# Replies in pieces

CUT = 5
"""Tokens after which the engine breaks the first piece off."""


def in_piece(number, spoil):
    """Spoil only the answer of one piece."""
    pieces = itertools.count()
    return lambda sent: spoil(sent) if next(pieces) == number else sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("spoil", "trained"),
    [(lambda sent: sent, [15]), (without(3), [CUT]), (twice(3), [CUT]), (half(3), [CUT + 3])],
    ids=["", "lost", "twice", "cut"],
)
async def test_each_piece_of_a_continued_reply_has_its_own_figures(stream, spoil, trained):
    """Only what the pieces prove is recorded. A client of a whole reply gets none that is made of uncertain ids: it is sampled again."""
    async with spoilt(options={"derenders": True}, aborted="continue") as (rig, gateway):
        rig.engine.faults.append(Fault.abort(CUT))
        gateway.spoil = in_piece(1, spoil)
        with contextlib.suppress(OSError, aiohttp.ClientError):
            await asked(rig, "s", stream=stream)
        exported, _, sums = await recorded(rig, "s")
    assert exported["complete"] == (trained == [15])
    assert sums[:1] == trained or not stream
    for sequence in exported["sequences"]:
        for turn in sequence["turns"]:
            start, end = turn["completion"]
            assert turn["pieces"] == [] or (turn["pieces"][-1]["end"], len(turn["pieces"])) == (end - start, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_with_a_gap_is_not_continued(stream):
    """The engine counts the tokens of a reply that it aborts: the prompt of the next piece would have the gap."""
    async with spoilt(options={"derenders": True}, aborted="continue") as (rig, gateway):
        rig.engine.faults.append(Fault.abort(CUT))
        gateway.spoil = in_piece(0, without(2))
        with contextlib.suppress(OSError, aiohttp.ClientError):
            await asked(rig, "s", stream=stream)
        exported, kinds, _ = await recorded(rig, "s")
        prompts = {tuple(entry.prompt_ids) for entry in rig.ground_truth("s")}
        assert len(prompts) == 1  # no request began with what was sampled
    assert not exported["complete"]
    assert "inconsistent-reply" in kinds

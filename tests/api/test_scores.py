"""Scores under an edited context: every sampled reply keeps its ids, the rest is the template's text, and what is not proven is refused."""

import asyncio
import itertools
import json
import random
from collections import Counter

import msgspec
import pytest

from tests.api.test_lifecycle import LosesTokens
from tests.client.both import KINDS, Wrapped
from tests.images import image
from tests.proxy.kit import CALL, THOUGHT, TOOLS, echo, proxied, results, user
from tests.proxy.test_exactness import NO_THOUGHT
from tests.proxy.test_several_models import served as several_models
from tests.proxy.traffic import Harness
from tests.support.plugin_engine import PluginEngine
from tokencache.api.scores import WrittenTurns
from tokencache.client import AsyncClient, RefusedError, ScoredTurn
from tokencache.core import ids
from tokencache.core.context import whole_contexts
from tokencache.core.context_edits import EditRefusal
from tokencache.core.drift import own_spans
from tokencache.core.turn import rebuild_prefix
from tokencache.testing import Fault
from tokencache.testing.template import CHAT_TEMPLATE

HINT = "Hint: the answer is in ü.txt ☕."
REPLIES = [f"<think>\nThought {n}, naïve café.\n</think>\n\nReply number {n}." for n in range(4)]


def engine(**options):
    made = PluginEngine(**{"episodes": {"talk": REPLIES}, "seed": 7, "dev_mode": True, **options})
    made.weights.loaded = "v1"
    return made


async def talk(rig, turns=3, session="s", **more):
    """Returns the messages of the last request, and its reply."""
    messages = [user("EPISODE:talk")]
    for _ in range(turns - 1):
        messages += [echo(await rig.say(session, messages, **more)), user("go on")]
    return [*messages, echo(await rig.say(session, messages, **more))]


async def score(rig, *edits, session="s", status=200, **more):
    url = f"{rig.url}/tokencache/v1/sessions/{session}/score"
    async with rig.http.post(url, json={"edits": list(edits), **more}) as answer:
        found = await answer.json()
    assert answer.status == status, found
    return found["turns"] if status == 200 else found["error"]


def insert(text=HINT, role="user", **at):
    return {**at, "insert": [{"role": role, "content": text}]}


# --- the checker ---


class Recorded:
    """The records of a session."""

    def __init__(self, turns, tokens, contexts):
        self.turns, self.contexts = {turn.id: turn for turn in turns}, whole_contexts(turns, contexts)
        self._lookup = {turn.id: (turn, tokens[turn.id]) for turn in turns}

    @classmethod
    async def read(cls, rig, session="s"):
        turns = await rig.store.turns(session)
        names = [turn.id for turn in turns]
        return cls(turns, await rig.store.tokens(session, names), await rig.store.contexts(session, names))

    def prompt(self, turn):
        return ids.unpack(rebuild_prefix(self._lookup, turn).prompt)

    def replies(self, turn):
        """The sampled replies in a turn's prompt, as lists of ids, in order."""
        spans = own_spans(self.turns[turn], self.turns, lambda name: rebuild_prefix(self._lookup, name).ids)
        return [self.prompt(turn)[span.start : span.end] for span in spans]


def edited_body(context, edits):
    """The request of a turn with other messages."""
    messages = [[json.loads(bytes(raw))] for raw in context.messages]
    places = {n: len(messages) if edit["at"] is None else edit["at"] % len(messages) for n, edit in enumerate(edits)}
    before = [[] for _ in range(len(messages) + 1)]
    for n, edit in enumerate(edits):
        if edit["at"] is not None and edit["at"] > len(messages) - ("replace" in edit):
            continue
        if "replace" in edit:
            messages[edit["at"]] = edit["replace"]
        else:
            before[len(messages) if edit["at"] == len(messages) else places[n]] += edit["insert"]
    both = itertools.zip_longest(before, messages, fillvalue=[])
    return {
        "messages": [*itertools.chain.from_iterable(new + old for new, old in both)],
        "tools": json.loads(bytes(context.tools or b"null")),
    }


def violations(prompt, replies, rendered, decode):
    """What is wrong with an edited prompt: a sampled reply has other ids, or the rest is not what the template writes."""
    found, at, text, shown = [], 0, decode(rendered).replace(NO_THOUGHT, ""), 0
    for n, reply in enumerate([*replies, []]):
        last = n == len(replies)
        size = len(reply)
        start = len(prompt) if last else next((i for i in range(at, len(prompt)) if prompt[i : i + size] == reply), -1)
        if start < 0:
            return [f"reply {n} has not the ids that were sampled"]
        between = decode(prompt[at:start]).removeprefix("<|im_end|>").replace(NO_THOUGHT, "")
        place = text.find(between, shown)
        if place < 0 or (n == 0 and place) or (last and not text.endswith(between)):
            found.append(f"the text before reply {n} is not the template's: {between[:80]!r}")
        at, shown = start + size, max(place, 0) + len(between)
    return found


def test_the_checker_finds_what_is_wrong():
    decode = "".join
    assert violations([*"ab", "R", *"cd"], [["R"]], [*"ab", "r", *"cd"], decode) == []
    assert violations([*"ab", "S", *"cd"], [["R"]], [*"ab", "r", *"cd"], decode)
    assert violations([*"ax", "R", *"cd"], [["R"]], [*"ab", "r", *"cd"], decode)
    assert violations([*"ab", "R", *"c"], [["R"]], [*"ab", "r", *"cd"], decode)
    assert violations([*"b", "R", *"cd"], [["R"]], [*"ab", "r", *"cd"], decode)


# --- exact ---


async def test_without_an_edit_the_score_is_what_was_recorded():
    async with proxied(engine()) as rig:
        messages = await talk(rig)
        recorded = await Recorded.read(rig)
        for edits in ([], [{"at": 0, "replace": [messages[0]]}], [{"at": 2, "replace": [user("go on")]}]):
            turns = await score(rig, *edits, top=2)
            assert [turn["edits"] for turn in turns] == [[n for n, edit in enumerate(edits) if edit["at"] < size] for size in (1, 3, 5)]
            for turn, entry in zip(turns, rig.ground_truth(), strict=True):
                assert (turn["refused"], turn["prompt_token_ids"]) == ("", recorded.prompt(turn["turn"]))
                assert (turn["token_ids"], turn["logprobs"]) == (entry.completion_ids, entry.logprobs)
                assert turn["score"] == pytest.approx(turn["logprobs"], abs=1e-5)
                assert {len(turn[name]) for name in ("loss_mask", "score", "top_ids", "top_logprobs")} == {len(turn["token_ids"])}
                assert {len(top) for top in turn["top_ids"]} == {2}


async def test_a_session_that_lost_tokens_is_refused_as_torn():
    async with proxied(engine()) as rig:
        await talk(rig)
        rig.store.__class__ = LosesTokens
        assert (await score(rig, status=409))["type"] == "torn_record"


async def test_a_hint_has_the_scores_of_the_engine_for_the_same_ids():
    async with proxied(engine()) as rig:
        await talk(rig)
        for edit in (insert(at=0), insert(at=1), insert(), insert(at=0, role="system"), {"at": 0, "replace": [user(HINT)]}):
            turns = await score(rig, edit, top=1)
            assert [turn["refused"] for turn in turns] == [""] * 3
            for turn in turns:
                assert HINT in rig.engine.tokenizer.decode(turn["prompt_token_ids"])
                body = {"model": "sim", "prompt": turn["prompt_token_ids"] + turn["token_ids"], "max_tokens": 1, "prompt_logprobs": 1}
                async with rig.http.post(rig.up + "/v1/completions", json=body) as answer:
                    (choice,) = (await answer.json())["choices"]
                forced = choice["prompt_logprobs"][-len(turn["token_ids"]) :]
                assert turn["score"] == [entries[str(token)]["logprob"] for entries, token in zip(forced, turn["token_ids"], strict=True)]
                assert turn["score"] != pytest.approx(turn["logprobs"], abs=1e-5)
        assert await score(rig, insert(), score=False) == [
            {**turn, "score": [], "top_ids": [], "top_logprobs": []} for turn in await score(rig, insert())
        ]


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.whole), pytest.param(5, marks=pytest.mark.whole)])
async def test_sampled_replies_keep_their_ids_in_every_kind_of_traffic(seed):
    rng, kinds = random.Random(seed), Counter()
    async with proxied(engine(episodes=None, seed=seed, drift=0.4, chunk_tokens=3)) as rig:
        harnesses = [Harness(rig, f"s{n}", seed) for n in range(4)]
        await asyncio.gather(*(harness.run(10) for harness in harnesses))
        for name in [harness.session for harness in harnesses]:
            recorded = await Recorded.read(rig, name)
            at = rng.choice([0, 1, -1, None])
            edits = [insert(at=at), *([{"at": rng.choice([0, 2]), "replace": [user("Other words.")]}] if rng.random() < 0.5 else [])]
            edits = [edit for edit in edits if any((edit["at"] or 0) < turn.messages for turn in recorded.turns.values())]
            for turn in await score(rig, *edits, session=name, score=False):
                kinds[recorded.turns[turn["turn"]].match, turn["refused"]] += 1
                if turn["refused"]:
                    continue
                context = recorded.contexts[turn["turn"]]
                rendered = rig.engine._render(edited_body(context, edits), context.kwargs)
                assert not violations(turn["prompt_token_ids"], recorded.replies(turn["turn"]), rendered, rig.engine.tokenizer.decode)
                assert turn["edits"] or turn["prompt_token_ids"] == recorded.prompt(turn["turn"])
        assert min(kinds[match, ""] for match in ("root", "continue", "branch", "resplice", "plain")) >= 1, kinds
        assert {refused for _, refused in kinds} <= {"", EditRefusal.SAMPLED_REPLY}, kinds


async def test_thinking_that_the_template_drops_stays_dropped():
    """`history: follow`: what the template shows of the replies is what was in the recorded prompt."""
    async with proxied(engine(), history="follow") as rig:
        await talk(rig)
        recorded = await Recorded.read(rig)
        *_, last = await score(rig, insert(at=0))
        assert (last["refused"], last["edits"]) == ("", [0])
        decode = rig.engine.tokenizer.decode
        assert decode(last["prompt_token_ids"]).count("Thought") == decode(recorded.prompt(last["turn"])).count("Thought") == 0
        assert [len(reply) > 0 for reply in recorded.replies(last["turn"])] == [True, True]


async def test_each_turn_is_scored_by_an_engine_of_its_model():
    async with several_models("policy", "judge", not_trainable="judge") as (rig, fleet):
        for model in ("policy", "judge"):
            await rig.say("s", [user("EPISODE:demo")], model=model)
        scored = {}
        for one in fleet.engines:
            one.choose_fault = lambda _, body, one=one: scored.setdefault(one.model, []).append((body.get("model"), body.get("prompt")))
        turns = await score(rig, insert())
        assert [turn["refused"] for turn in turns] == ["", ""]
        for model, turn in zip(("policy", "judge"), turns, strict=True):
            assert [one for one in scored[model] if one[1]] == [(model, turn["prompt_token_ids"] + turn["token_ids"])]
        assert [set(turn["loss_mask"]) for turn in turns] == [{1}, {0}]
        assert [any(turn["logprobs"]) for turn in turns] == [True, False]


# --- refused ---


async def test_an_edit_that_changes_what_is_shown_of_a_reply_is_refused():
    """`history: follow`: after the hint, a new question, the template drops the thinking that was in the recorded prompt."""
    async with proxied(engine(episodes={"call": [f"{THOUGHT}Let me look.\n{CALL}", *REPLIES]}), history="follow") as rig:
        messages = [user("EPISODE:call")]
        said = await rig.say("s", messages, tools=TOOLS)
        await rig.say("s", [*messages, {**echo(said), "reasoning": said["reasoning"]}, *results(said)], tools=TOOLS)
        first, second = await score(rig, insert())
        assert (first["refused"], second["refused"], second["score"]) == ("", "reply-changes", [])
        assert "another part of a sampled reply" in second["error"]
        _, second = await score(rig, insert(at=0))
        assert second["refused"] == ""


async def test_a_sampled_reply_is_not_replaced():
    async with proxied(engine()) as rig:
        await talk(rig)
        first, *others = await score(rig, {"at": 1, "replace": [user("I never said that.")]})
        assert (first["refused"], first["edits"]) == ("", []), "its prompt has no message there"
        assert {turn["refused"] for turn in others} == {"sampled-reply"}
        for turn in others:
            assert "keeps its ids" in turn["error"]
            assert (turn["prompt_token_ids"], turn["score"]) == ([], [])
            assert len(turn["token_ids"]) == len(turn["logprobs"]) > 0


async def test_words_of_the_client_about_a_reply_are_replaced_as_text():
    """A reply that the client changed was rendered as text, so it is no sampled reply of the later prompt."""
    async with proxied(engine()) as rig:
        messages = await talk(rig, turns=1)
        await rig.say("s", [messages[0], {"role": "assistant", "content": "What it never said."}, user("go on")])
        _, second = await score(rig, {"at": 1, "replace": [{"role": "assistant", "content": HINT}]})
        assert (second["refused"], second["edits"]) == ("", [0])
        assert HINT in rig.engine.tokenizer.decode(second["prompt_token_ids"])


async def test_what_is_not_proven_is_refused_in_words():
    async with proxied(engine()) as rig:
        await talk(rig)
        other = CHAT_TEMPLATE.replace("{{- turn(message.role, text) }}", "{{- turn(message.role, text + '!') }}")
        by_hint = CHAT_TEMPLATE.replace(
            "enable_thinking is defined and enable_thinking is false",
            "messages[0].content is string and '/no_think' in messages[0].content",
        )
        for template, edit, refused in (
            (other, insert(), "rendered-otherwise"),
            (by_hint, insert("/no_think", at=0), "prompt-changes"),
            (CHAT_TEMPLATE, {"insert": [{"role": "user", "content": "x"}]}, ""),
        ):
            rig.engine.tokenizer.chat_template = template
            turns = await score(rig, edit)
            assert {turn["refused"] for turn in turns} == {refused}
            assert all(bool(turn["error"]) == bool(refused) and bool(turn["score"]) != bool(refused) for turn in turns)


async def test_a_template_that_refuses_the_edit_refuses_the_turn(monkeypatch):
    async with proxied(engine()) as rig:
        await talk(rig, turns=2)
        rig.engine.tokenizer.chat_template = CHAT_TEMPLATE.replace(
            "{%- for message in messages %}",
            "{%- for message in messages %}{%- if message.role == 'critic' %}{{- raise_exception('no critics') }}{%- endif %}",
            1,
        )
        turns = await score(rig, insert(role="critic"))
        assert {turn["refused"] for turn in turns} == {"template-refuses"}


async def test_images_are_refused(rig_with_image):
    (turn,) = await score(rig_with_image, insert())
    assert turn["refused"] == "media"


async def test_what_no_rendering_of_messages_gives_is_refused(rig_with_two_turns):
    """A text completion, and a reply whose beginning the client sent: one that was recorded, and one that was not."""
    rig = rig_with_two_turns
    await rig.post("s", "/v1/completions", model="sim", prompt="Once upon a time", max_tokens=5)
    continues = {"add_generation_prompt": False, "continue_final_message": True}
    await rig.say("s", [user("EPISODE:talk"), {"role": "assistant", "content": "What I"}], **continues)
    cut = await rig.say("t", [user("EPISODE:talk")], max_tokens=25)
    begun = {name: value for name, value in cut.items() if value}
    await rig.say("t", [user("EPISODE:talk"), begun], **continues)
    assert [turn["refused"] for turn in await score(rig, insert())] == ["", "", "no-proof", "reply-in-parts"]
    assert [turn["refused"] for turn in await score(rig, insert(), session="t")] == ["", "reply-in-parts"]


async def test_requests_that_are_not_kept_are_refused(rig_with_two_turns, monkeypatch):
    async def nothing(*_):
        return {}

    monkeypatch.setattr(rig_with_two_turns.store, "contexts", nothing)
    assert {turn["refused"] for turn in await score(rig_with_two_turns, insert())} == {"not-kept"}
    assert {turn["refused"] for turn in await score(rig_with_two_turns)} == {""}, "without an edit nothing is rendered"
    monkeypatch.setattr(rig_with_two_turns.proxy._edited._prefixes, "get", torn)
    assert {turn["refused"] for turn in await score(rig_with_two_turns)} == {"torn-record"}


async def torn(*_):
    raise ValueError("3 prompt tokens rebuilt, 4 recorded")


async def test_an_engine_that_takes_no_ids_proves_nothing():
    async with proxied(engine(honours_ids=False)) as rig:
        await talk(rig, turns=1)
        (turn,) = await score(rig, insert())
        assert turn["refused"] == "no-proof"
        assert "nothing can be proven for this turn (" in turn["error"]
        (turn,) = await score(rig)
        assert turn["score"] == pytest.approx(turn["logprobs"], abs=1e-5)


async def test_ids_of_the_client_are_not_rendered_again(rig_with_two_turns):
    """They are not recorded, so nothing shows which of them the model sampled."""
    rig = rig_with_two_turns
    _, said = await rig.post("a", messages=[user("EPISODE:talk")], return_token_ids=True, logprobs=True)
    (choice,) = said["choices"]
    returned = {"prompt_token_ids": said["prompt_token_ids"], "generation_token_ids": choice["token_ids"], "generation_log_probs": []}
    messages = [user("EPISODE:talk"), {**echo(choice["message"]), **returned}, user("go on")]
    messages += [echo(await rig.say("b", messages)), user("go on")]
    await rig.say("b", messages)
    assert [turn["reason"] for turn in await rig.turns("b")] == ["client-ids", ""]
    assert [turn["refused"] for turn in await score(rig, insert(), session="b")] == ["unproven", "unproven"]


async def test_a_fork_is_scored_and_its_shared_turns_have_no_recorded_values(rig_with_two_turns):
    rig = rig_with_two_turns
    whole = await score(rig, insert())
    async with AsyncClient(rig.url) as client:
        fork = await client.fork("s", whole[0]["turn"], "f")
        messages = [user("EPISODE:talk"), echo({"content": "Reply number 0."}), user("and now?")]
        await rig.say("f", messages)
        shared, own = (await fork.score([insert()])).turns
    assert (shared.score, set(shared.loss_mask), set(shared.logprobs)) == (whole[0]["score"], {0}, {0.0})
    assert (own.refused, set(own.loss_mask)) == ("", {1})
    assert rig.engine.tokenizer.decode(own.prompt_token_ids).count("Thought 0") == 1, "the shared reply has its exact ids"


@pytest.mark.parametrize(
    ("edit", "param", "words"),
    [
        ({"at": 9, "insert": [user("x")]}, "edits[0].at", "no chosen turn has that place: the longest has 3 messages"),
        ({"at": 3, "replace": [user("x")]}, "edits[0].at", "no chosen turn has that place"),
        ({"at": 0}, "edits", "give `insert` or `replace`"),
        ({"replace": [user("x")]}, "edits", "`replace` needs `at`"),
        ({"at": 0, "insert": [user("x"), {"content": "y"}]}, "edits[0].insert[1]", "missing required field `role`"),
        (
            {"at": 0, "insert": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "edits[0].insert[0]",
            "text",
        ),
        ({"at": 0, "insert": [user("x")], "afer": 1}, "edits.0.afer", "unknown"),
        ({"at": "0", "insert": [user("x")]}, "edits", "`edits[0].at`"),
    ],
)
async def test_an_edit_that_cannot_be_read_names_its_path(rig_with_two_turns, edit, param, words):
    error = await score(rig_with_two_turns, edit, status=422)
    assert error["param"] == param
    assert words in error["message"]


async def test_two_edits_of_one_message_and_unknown_turns_are_refused(rig_with_two_turns):
    rig, replace = rig_with_two_turns, {"at": 0, "replace": [user("x")]}
    assert "`edits[1]` replaces" in (await score(rig, replace, replace, status=422))["message"]
    assert (await score(rig, replace, turns=["t9"], status=422))["param"] == "turns"
    assert (await score(rig, session="nobody", status=404))["type"] == "not_found_error"


# --- the engine fails ---


async def test_an_engine_that_fails_in_the_middle_gives_no_score_and_changes_nothing(rig_with_two_turns):
    rig = rig_with_two_turns
    exported, whole = await rig.exported(), await score(rig, insert())
    for path in ("/v1/completions", "/tokenize"):
        for fault in (Fault.close(path=path), Fault.answer(500, path=path)):
            seen = itertools.count()
            rig.engine.choose_fault = lambda route, _, fault=fault, seen=seen: fault if route == fault.path and next(seen) else None
            error = await score(rig, insert(), status=502)
            assert error["type"] == "upstream_error"
            rig.engine.choose_fault = None
    assert await score(rig, insert()) == whole
    assert await rig.exported() == exported


async def test_a_turn_that_the_engine_refuses_has_its_words(rig_with_two_turns, monkeypatch):
    rig = rig_with_two_turns
    refusal = Fault.answer(400, '{"error": {"message": "too long for me"}}', path="/v1/completions")
    rig.engine.choose_fault = lambda route, _: refusal if route == refusal.path else None
    turns = await score(rig, insert())
    assert {(turn["refused"], turn["error"].endswith("the engine refuses with 400: too long for me")) for turn in turns} == {
        ("not-scored", True)
    }
    rig.engine.choose_fault = None
    monkeypatch.setattr("tokencache.scoring.request.VALUES_AT_ONCE", 40)
    turns = await score(rig, insert())
    assert {turn["refused"] for turn in turns} == {"not-scored"}
    assert "the most at once" in turns[0]["error"]


async def test_weights_that_change_meanwhile_are_noticed(rig_with_two_turns):
    rig = rig_with_two_turns
    rig.engine.weights.label = "v1"

    def change(route, _body):
        if route == "/v1/completions":
            rig.engine.weights.label = "v2"

    rig.engine.choose_fault = change
    assert "from version 'v1' to 'v2'" in (await score(rig, insert(), status=409))["message"]


# --- long sessions ---


async def test_the_answer_is_written_one_turn_at_a_time():
    async with proxied(engine()) as rig:
        await talk(rig, turns=4)
        turns = await score(rig, insert())
        async with rig.http.post(f"{rig.url}/tokencache/v1/sessions/s/score", json={"edits": [insert()]}) as answer:
            parts, part = [], b""
            async for data, ends in answer.content.iter_chunks():
                part += data
                if ends:
                    parts, part = [*parts, part.strip(b",")], b""
        assert [json.loads(part) for part in parts[1:-1]] == turns
        assert len(turns) == 4


def test_what_is_held_of_an_answer_grows_with_the_session_and_not_with_its_square():
    found, written, rng, count = WrittenTurns(), [], random.Random(5), 200
    for number in range(count):
        base = rng.randrange(max(0, number - 3), number) if number else None
        prompt = [*(written[base].prompt_token_ids[: -1 - number % 3] if base is not None else ()), *range(number, number + 50)]
        turn = ScoredTurn(turn=f"t{number}", sequence="t0", prompt_token_ids=prompt, token_ids=[7], logprobs=[-0.5], score=[-0.25])
        found.add(turn, f"t{base}" if base is not None else "another")
        written.append(turn)
    whole = [msgspec.json.encode(turn) for turn in written]
    assert [*found] == whole
    assert found.held < 500 * count < sum(map(len, whole)) / 10


# --- the client ---


@pytest.mark.parametrize("kind", KINDS)
async def test_either_client_scores_a_session(rig_with_two_turns, kind):
    rig = rig_with_two_turns
    client = Wrapped(KINDS[kind](rig.url))
    async with client:
        session = client.inner.session("s")
        found = await Wrapped(session).score([insert()], top=1)
        assert [turn.score for turn in found.turns] == [turn["score"] for turn in await score(rig, insert())]
        assert (found.session, [len(turn.top_ids) for turn in found.turns]) == ("s", [len(turn.token_ids) for turn in found.turns])
        (second,) = (await Wrapped(session).score([insert()], turns=[found.turns[1].turn], score=False)).turns
        assert (second.prompt_token_ids, second.score) == (found.turns[1].prompt_token_ids, [])
        with pytest.raises(RefusedError, match=r"edits\[0\]"):
            await Wrapped(session).score([{"at": 0}])


@pytest.fixture
async def rig_with_two_turns():
    async with proxied(engine()) as rig:
        await talk(rig, turns=2)
        yield rig


@pytest.fixture
async def rig_with_image():
    async with proxied(engine(images="plugin")) as rig:
        await rig.say("s", [{"role": "user", "content": [{"type": "text", "text": "EPISODE:talk"}, image(1)]}])
        yield rig

"""Conversations with images on an engine without the plugin: exact prompts as compact ids, by `/inference/v1/generate`."""

import itertools

import pytest

from tests.images import image
from tests.proxy.kit import TOOLS, echo, proxied, results, user
from tests.proxy.test_images import EPISODES, dialect_bodies, second_turn_disagrees, shown, talk
from tests.support.plugin_engine import PluginEngine
from tests.support.plugin_engine.images import GenerateFault
from tests.support.waiting import PATIENCE
from tokencache.testing.faults import Fault
from tokencache.testing.generate_route import GENERATE

RENDER = "/v1/chat/completions/render"


def without_plugin(episodes=EPISODES, **options):
    return PluginEngine(episodes=episodes, seed=7, images="stock", derenders=True, **options)


@pytest.fixture
async def rig():
    async with proxied(without_plugin()) as made:
        yield made


async def found(rig):
    return (await rig.readiness())["engines"][0]["models"][0]


async def test_the_probe_finds_the_route_and_says_why_it_is_not_the_plugin(rig):
    model = await found(rig)
    assert model["images"] == "generate"
    assert "plugin" in model["images_why"]
    assert [[rig.engine.tokenizer.token(token) for token in model[name]] for name in ("placeholder", "placeholder_ids")] == [
        ["<|image_pad|>"]
    ] * 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_turn_continues_and_names_its_images(rig, stream):
    await found(rig)
    rig.engine.generated.clear()
    await talk(rig, stream=stream)
    turns = await rig.turns()
    assert [(turn["match"], turn["reason"]) for turn in turns] == [("root", "")] + [("continue", "")] * 3
    (sequence,) = (await rig.check())["sequences"]
    assert [medium["length"] for medium in sequence["media"]] == [1, 3, 1, 2, 3]
    pad = rig.engine.tokenizer.id_of("<|image_pad|>")
    inside = [at for medium in sequence["media"] for at in range(medium["start"], medium["start"] + medium["length"])]
    assert inside == [at for at, token in enumerate(sequence["token_ids"]) if token == pad]
    for earlier, later in itertools.pairwise(rig.ground_truth()):
        prefix = earlier.prompt_ids + earlier.completion_ids
        assert later.prompt_ids[: len(prefix)] == prefix
    assert [len(sent["content_parts"]) for sent in rig.engine.generated] == [3, 4, 5]


@pytest.mark.parametrize("dialect", ["messages", "responses", "gemini"])
async def test_every_dialect_continues(rig, dialect):
    path, body = dialect_bodies("EPISODE:see go", image(1))[dialect]
    status, said = await rig.post("s", path, **body)
    assert status == 200, said
    await rig.say("s", [shown("EPISODE:see go", image(1)), {"role": "assistant", "content": "A cat."}, shown("And this?", image(2))])
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
    await rig.check()


async def test_the_harness_gets_what_chat_would_return():
    answers = []
    for engine in (without_plugin(), PluginEngine(episodes=EPISODES, seed=7, images="plugin")):
        async with proxied(engine) as rig:
            messages = [shown("EPISODE:look go", image(1))]
            message = await rig.say("s", messages, tools=TOOLS)
            messages += [echo(message), *results(message), shown("And this?", image(2, width=60))]
            status, said = await rig.post(
                "s", messages=messages, tools=TOOLS, logprobs=True, top_logprobs=2, return_token_ids=True, max_tokens=99
            )
            assert status == 200, said
            (choice,) = said["choices"]
            call = rig.ground_truth()[1]
            assert (said["prompt_token_ids"], choice["token_ids"]) == (call.prompt_ids, call.completion_ids)
            assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == call.logprobs
            words = [choice["message"]["content"], choice["message"]["reasoning"], choice["finish_reason"], said["object"]]
            answers.append([*words, {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]}])
    assert answers[0] == answers[1]


async def test_the_request_has_the_sampling_parameters_of_chat_and_the_limit_that_is_left(rig):
    messages = [shown("EPISODE:see go", image(1))]
    messages.append(echo(await rig.say("s", messages)))
    rig.engine.generated.clear()
    messages += [shown("And this?", image(2))]
    messages.append(echo(await rig.say("s", messages, temperature=0.25, stop=["zzz"], stream=True)))
    await rig.say("s", [*messages, user("go on")], max_tokens=7, cache_salt="mine")
    first, second = (sent["sampling_params"] for sent in rig.engine.generated)
    prompt = rig.ground_truth()[1].prompt_ids
    assert (first["temperature"], first["stop"], first["logprobs"]) == (0.25, ["zzz"], 0)
    assert first["max_tokens"] == rig.engine.max_model_len - len(prompt)
    assert second["max_tokens"] == 7
    assert rig.engine.generated[1]["cache_salt"]


async def test_an_edited_history_keeps_its_replies(rig):
    messages = await talk(rig, 2)
    messages[0] = shown("EPISODE:look go [an image was here]", image(2, width=60))
    await rig.say("s", messages, tools=TOOLS)
    first, second, third = await rig.turns()
    assert (third["match"], third["reason"]) == ("resplice", "context-edited")
    assert [anchor["turn"] for anchor in third["anchors"]] == [first["turn"], second["turn"]]
    assert [len(sequence["media"]) for sequence in (await rig.check())["sequences"]] == [3, 3]


async def test_adjacent_images_of_other_sizes(rig):
    """In the prompt nothing divides them but their sizes."""
    messages = [shown("EPISODE:see go", image(1), image(2, width=84), image(3, width=56))]
    messages.append(echo(await rig.say("s", messages)))
    messages.append({"role": "user", "content": [image(4, width=56), image(5), image(4, width=84)]})
    await rig.say("s", messages)
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
    assert [medium["length"] for medium in (await rig.check())["sequences"][0]["media"]] == [1, 3, 2, 2, 1, 3]


WRONG = {
    GenerateFault.RETOKENIZED: "the engine used other ids",
    GenerateFault.UNEXPANDED: "the engine used other ids",
    GenerateFault.WRONG_RANGES: "other places",
}


@pytest.mark.parametrize("fault", WRONG)
async def test_an_engine_that_errs_later_is_noticed(rig, fault):
    await second_turn_disagrees(rig, "generate_fault", fault, WRONG[fault])


@pytest.mark.parametrize("fault", GenerateFault)
async def test_the_probe_does_not_trust_an_engine_that_errs(fault):
    """One that tokenizes the prompt again is what Gemma 3 is on vLLM 0.32."""
    engine = without_plugin()
    engine.images.generate_fault = fault
    async with proxied(engine) as rig:
        model = await found(rig)
        assert (model["level"], model["images"]) == ("exact", "")
        assert GENERATE in model["images_why"]


PLACEHOLDERS = {
    "a reply": (["I draw <|image_pad|> for you.", "Yes."], "go"),
    "a user": (["A cat.", "Yes."], "What is <|image_pad|>?"),
}


@pytest.mark.parametrize("who", PLACEHOLDERS)
async def test_a_placeholder_that_is_text_is_refused(who):
    """The engine would put an image there."""
    episode, words = PLACEHOLDERS[who]
    async with proxied(without_plugin({"draw": episode})) as rig:
        messages = [shown("EPISODE:draw go", image(1))]
        messages.append(echo(await rig.say("s", messages)))
        rig.engine.generated.clear()
        await rig.say("s", [*messages, shown(words, image(2))])
        assert [(turn["match"], turn["reason"]) for turn in await rig.turns()] == [("root", ""), ("plain", "not-for-generate")]
        assert rig.engine.generated == []
        await rig.check()


@pytest.mark.parametrize("broken", ["R0lGODlh", "@@"])
async def test_a_broken_image_is_the_engines_to_refuse_and_the_session_goes_on(rig, broken):
    messages = [shown("EPISODE:see go", image(1))]
    messages.append(echo(await rig.say("s", messages)))
    bad = shown("And this?", {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{broken}"}})
    answered = await rig.post("s", messages=[*messages, bad])
    assert answered == await rig.post(None, url=rig.up, messages=[*messages, bad])
    assert answered[0] == 400
    await rig.say("s", [*messages, shown("And this?", image(2))])
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
    await rig.check()


async def test_a_first_turn_whose_places_are_not_known_is_not_continued(rig):
    """The rendering that reports them failed. Nothing says then which images its tokens are for."""
    await found(rig)
    rig.engine.faults.append(Fault.answer(500, path=RENDER))
    messages = [shown("EPISODE:see go", image(1))]
    messages.append(echo(await rig.say("s", messages)))
    messages.append(shown("And this?", image(2)))
    messages.append(echo(await rig.say("s", messages)))
    await rig.say("s", [*messages, user("go on")])
    turns = await rig.turns()
    assert [(turn["match"], turn["reason"]) for turn in turns] == [("root", ""), ("plain", "unrecognised-reply"), ("continue", "")]
    assert [len(sequence["media"]) for sequence in (await rig.check())["sequences"]] == [0, 2]


async def test_an_engine_that_cannot_render_now_is_asked_again():
    async with proxied(without_plugin(), hold=PATIENCE) as rig:
        messages = [shown("EPISODE:see go", image(1))]
        messages.append(echo(await rig.say("s", messages)))
        rig.engine.faults.append(Fault.answer(503, path=RENDER))
        await rig.say("s", [*messages, shown("And this?", image(2))])
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        await rig.check()


async def test_a_reply_that_cannot_be_parsed_keeps_its_tokens(rig):
    await found(rig)
    messages = [shown("EPISODE:look go", image(1))]
    messages.append(echo(await rig.say("s", messages, tools=TOOLS)))
    rig.engine.faults.append(Fault.answer(500, path="/v1/chat/completions/derender"))
    status, _ = await rig.post("s", messages=[*messages, *results(messages[-1])], tools=TOOLS)
    assert status == 502
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
    assert sum(len(sequence["turns"]) for sequence in (await rig.check())["sequences"]) == 2

"""Conversations with images: every turn continues on exact ids, in every dialect, whatever happens to the images."""

import base64
import hashlib
import json

import pytest

from tests.images import image
from tests.proxy.kit import CALL, CHAT, HEADER, THOUGHT, TOOLS, echo, proxied, results, user
from tests.support.plugin_engine import PluginEngine
from tests.support.plugin_engine.images import ImageFault
from tests.support.waiting import PATIENCE
from tokencache.core import ids
from tokencache.testing import Fault

EPISODES = {
    "look": [f"{THOUGHT}A cat.\n{CALL}", f"{THOUGHT}A dog  — naïve.", f"{THOUGHT}A house.\n{CALL}", "<think>\nok\n</think>\n\nYes."],
    "see": [f"{THOUGHT}A cat.  ", f"{THOUGHT}A dog  — naïve.", "<think>\nok\n</think>\n\nYes."],
}


def seeing(**options):
    return PluginEngine(episodes=EPISODES, seed=7, images="plugin", **options)


def shown(text, *images):
    return {"role": "user", "content": [{"type": "text", "text": text}, *images]}


@pytest.fixture
async def rig():
    async with proxied(seeing()) as made:
        yield made


async def test_the_probe_finds_the_plugin(rig):
    (model,) = (await rig.get("/readyz"))["engines"][0]["models"]
    assert (model["images"], model["images_why"]) == ("plugin", "")
    assert [rig.engine.tokenizer.token(token) for token in model["placeholder_ids"]] == ["<|image_pad|>"]


async def talk(rig, turns=4, **more):
    """A conversation with an image in every message, also in tool results."""
    messages = [shown("EPISODE:look go", image(1), image(2, width=60))]
    for turn in range(turns):
        said = await rig.say("s", messages, tools=TOOLS, **more)
        messages += [echo(said)]
        for answer in results(said):
            picture = image(1 if turn == 1 else 10 + turn, height=28 * (turn + 1))
            messages.append(answer | {"content": [{"type": "text", "text": "See."}, picture]})
    return messages


@pytest.mark.parametrize("stream", [False, True])
async def test_every_turn_continues_and_names_its_images(rig, stream):
    await talk(rig, stream=stream)
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue", "continue"]
    exported = await rig.check()
    (sequence,) = exported["sequences"]
    pad = rig.engine.tokenizer.id_of("<|image_pad|>")
    inside = [at for medium in sequence["media"] for at in range(medium["start"], medium["start"] + medium["length"])]
    assert inside == [at for at, token in enumerate(sequence["token_ids"]) if token == pad]
    assert [medium["length"] for medium in sequence["media"]] == [1, 3, 1, 2, 3]
    assert {medium["modality"] for medium in sequence["media"]} == {"image"}


def dialect_bodies(words, picture):
    """The first request of a conversation with one image, in each dialect: path and body."""
    uri = picture["image_url"]["url"]
    data = uri.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {
        "chat": (CHAT, {"messages": [shown(words, picture)]}),
        "messages": (
            "/v1/messages",
            {
                "model": "sim",
                "max_tokens": 99,
                "messages": [{"role": "user", "content": [text(words), {"type": "image", "source": source}]}],
            },
        ),
        "responses": (
            "/v1/responses",
            {
                "model": "sim",
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": words}, {"type": "input_image", "image_url": uri}]},
                ],
            },
        ),
        "gemini": (
            "/v1beta/models/sim:generateContent",
            {"contents": [{"role": "user", "parts": [{"text": words}, {"inlineData": {"mimeType": "image/png", "data": data}}]}]},
        ),
    }


@pytest.mark.parametrize("dialect", ["messages", "responses", "gemini"])
async def test_an_image_is_the_same_in_every_dialect(rig, dialect):
    path, body = dialect_bodies("EPISODE:see go", image(1))[dialect]
    status, said = await rig.post("s", path, **body)
    assert status == 200, said
    await rig.say("s", [shown("EPISODE:see go", image(1)), {"role": "assistant", "content": "A cat."}, shown("And this?", image(2))])
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
    await rig.check()


async def test_an_image_that_was_dropped_leaves_the_replies_exact(rig):
    messages = await talk(rig, 2)
    messages[0] = shown("EPISODE:look go [an image was here]", image(2, width=60))
    await rig.say("s", messages, tools=TOOLS)
    first, second, third = await rig.turns()
    assert (third["match"], third["reason"]) == ("resplice", "context-edited")
    assert [anchor["turn"] for anchor in third["anchors"]] == [first["turn"], second["turn"]]
    await rig.check()


@pytest.mark.parametrize("other", [image(9), image(1, width=60)], ids=["same size", "other size"])
async def test_another_image_in_the_past_is_an_edited_context(rig, other):
    """Also one of the same size, which has the same ids."""
    messages = await talk(rig, 2)
    messages[0] = shown("EPISODE:look go", other, image(2, width=60))
    await rig.say("s", messages, tools=TOOLS)
    first, second, third = await rig.turns()
    assert (third["match"], [anchor["turn"] for anchor in third["anchors"]]) == ("resplice", [first["turn"], second["turn"]])
    exported = await rig.check()
    assert [sequence["media"][0]["sha256"] for sequence in exported["sequences"]] == [sha256(image(1)), sha256(other)]


async def test_another_detail_of_the_same_image_is_rendered_alike(rig):
    """It is another message, but the engine uses the same ids and the same bytes."""
    messages = await talk(rig, 2)
    messages[0]["content"][1]["image_url"]["detail"] = "low"
    await rig.say("s", messages, tools=TOOLS)
    turn = (await rig.turns())[-1]
    assert (turn["match"], turn["reason"]) == ("continue", "rendered-alike")
    await rig.check()


async def test_the_same_image_written_in_another_way_continues(rig):
    messages = [shown("EPISODE:see go", image(1))]
    messages.append(echo(await rig.say("s", messages)))
    uri = image(1)["image_url"]["url"].replace("data:image/png;", "data:image/jpeg;charset=x;")
    messages[0] = shown("EPISODE:see go", {"type": "image_url", "image_url": {"url": uri, "detail": "auto"}})
    await rig.say("s", [*messages, *results(messages[-1])])
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]


async def test_a_conversation_may_lose_all_its_images(rig):
    messages = await talk(rig, 2)
    messages[0] = user("EPISODE:look go")
    messages[2:] = [messages[2] | {"content": "gone"}, messages[3], user("go on")]
    await rig.say("s", messages, tools=TOOLS)
    assert (await rig.turns())[-1]["match"] == "resplice"
    assert [sequence["media"] for sequence in (await rig.check())["sequences"]][-1] == []


WRONG = {
    ImageFault.REEXPANDED: "the engine used other ids",
    ImageFault.IGNORED: "the engine used other ids",
    ImageFault.WRONG_RANGES: "other places",
    ImageFault.NO_RANGES: "more media",
}


async def second_turn_disagrees(rig, member, fault, words):
    """A conversation whose second reply is for another prompt than was sent, because of a fault; returns its messages and that turn."""
    messages = [shown("EPISODE:see go", image(1), image(2, width=60))]
    messages.append(echo(await rig.say("s", messages)))
    setattr(rig.engine.images, member, fault)
    messages += [*results(messages[-1]), shown("And this?", image(3))]
    messages.append(echo(await rig.say("s", messages)))
    _, turn = await rig.turns()
    assert (turn["match"], turn["reason"]) == ("plain", "engine-disagrees")
    assert "engine-disagrees" in turn["marks"]
    (incident,) = (await rig.info())["incidents"]
    assert incident["kind"] == "engine-disagrees"
    assert words in incident["detail"]
    return messages, turn


@pytest.mark.parametrize("fault", WRONG)
async def test_an_engine_that_errs_later_is_noticed(rig, fault):
    messages, turn = await second_turn_disagrees(rig, "fault", fault, WRONG[fault])
    rig.engine.images.fault = None
    await rig.say("s", [*messages, user("go on")])
    assert (await rig.turns())[-1]["parent"] != turn["turn"], "nothing continues what the engine did by itself"


async def test_placeholders_that_the_engine_does_not_find_are_rendered(rig):
    messages = [shown("EPISODE:see go", image(1))]
    messages.append(echo(await rig.say("s", messages)))
    rig.engine.images.fault = ImageFault.NOT_FOUND
    await rig.say("s", [*messages, *results(messages[-1])])
    assert [(turn["match"], turn["reason"]) for turn in await rig.turns()] == [("root", ""), ("plain", "engine-refused-ids")]
    await rig.check()


async def test_a_placeholder_that_the_model_sampled_is_marked_and_stays():
    words = [f"I draw <|image_pad|><|image_pad|> for you.\n{CALL}", "Yes.", "No."]
    async with proxied(PluginEngine(episodes={"draw": words}, seed=7, images="plugin")) as rig:
        messages = [shown("EPISODE:draw go", image(1))]
        for _ in range(2):
            messages.append(echo(await rig.say("s", messages, tools=TOOLS)))
            messages += [*results(messages[-1]), shown("And this?", image(2, width=84))]
        await rig.say("s", [shown("EPISODE:draw go, but", image(1)), *messages[1:]], tools=TOOLS)
        turns = await rig.turns()
        assert [turn["match"] for turn in turns] == ["root", "continue", "resplice"]
        assert ["sampled-placeholder" in turn["marks"] for turn in turns] == [True, False, False]
        sampled = [request["kv_transfer_params"]["tokencache_prompt"]["sampled"] for request in rig.engine.requests[-2:]]
        assert [len(places) for places in sampled] == [2, 2]
        await rig.check()


@pytest.mark.parametrize("mode", ["stock", ""])
async def test_an_engine_without_the_plugin_is_relayed_and_says_why(mode):
    async with proxied(PluginEngine(episodes=EPISODES, seed=7, images=mode)) as rig:
        (model,) = (await rig.get("/readyz"))["engines"][0]["models"]
        assert (model["images"], model["level"]) == ("", "exact")
        assert ("plugin" if mode else "not a multimodal model") in model["images_why"]
        messages = [shown("EPISODE:see go", image(1))]
        status, said = await rig.post("s", messages=messages)
        if not mode:
            assert status == 400
            assert "not a multimodal model" in said["error"]["message"]
            assert (await rig.say("s", [user("EPISODE:see go")]))["content"].strip() == "A cat."
            return
        messages.append(echo(said["choices"][0]["message"]))
        await rig.say("s", [*messages, *results(messages[-1])])
        assert [(turn["match"], turn["reason"], turn["marks"]) for turn in await rig.turns()] == [("plain", "media", ["media"])] * 2
        await rig.check()


@pytest.mark.parametrize("mode", ImageFault)
async def test_the_probe_does_not_trust_an_engine_that_errs(mode):
    engine = seeing()
    engine.images.fault = mode
    async with proxied(engine) as rig:
        (model,) = (await rig.get("/readyz"))["engines"][0]["models"]
        assert model["images"] == ""
        assert model["images_why"]


BROKEN = {
    "no image": {"type": "image_url", "image_url": {"url": "data:image/png;base64,R0lGODlh"}},
    "no base64": {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}},
    "another kind": {"type": "input_video", "input_video": "x" * 5000},
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_image_is_the_engines_to_refuse_and_the_session_goes_on(rig, name):
    messages = [shown("EPISODE:see go", image(1))]
    messages.append(echo(await rig.say("s", messages)))
    messages += results(messages[-1])
    status, said = await rig.post("s", messages=[*messages, shown("And this?", BROKEN[name])])
    direct, refused = await rig.post(None, url=rig.up, messages=[*messages, shown("And this?", BROKEN[name])])
    assert (status, said) == (direct, refused)
    assert status == 400
    await rig.say("s", [*messages, shown("And this?", image(2))])
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
    await rig.check()


async def test_a_salt_that_is_no_text_is_the_engines_to_refuse(rig):
    body = json.dumps({"model": "sim", "messages": [shown("EPISODE:talk", image(1))], "cache_salt": "SALT"}).encode()
    headers = {HEADER: "s", "Content-Type": "application/json"}
    async with rig.http.post(rig.url + CHAT, data=body.replace(b"SALT", b"\xff"), headers=headers) as answer:
        assert answer.status == 400, await answer.text()


async def test_an_image_by_url_is_relayed_and_says_why(rig):
    messages = [shown("EPISODE:see go", {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}})]
    messages.append(echo(await rig.say("s", messages)))
    await rig.say("s", [*messages, *results(messages[-1])])
    turns = await rig.turns()
    assert [(turn["match"], turn["reason"]) for turn in turns] == [("plain", "media-by-url")] * 2
    exported = await rig.check()
    assert [medium["sha256"] for medium in exported["sequences"][0]["media"]] == [""]


async def test_a_harness_that_names_images_by_uuid_is_not_trusted(rig):
    """vLLM believes the name, and may use the image that had it first."""
    messages = [shown("EPISODE:see go", image(1) | {"uuid": "u"})]
    messages.append(echo(await rig.say("s", messages)))
    await rig.say("s", [*messages, *results(messages[-1])])
    assert [(turn["match"], turn["reason"]) for turn in await rig.turns()] == [("plain", "media")] * 2


async def test_template_history_is_rendered():
    async with proxied(seeing(), history="follow") as rig:
        await talk(rig, 2)
        assert [(turn["match"], turn["reason"]) for turn in await rig.turns()] == [("plain", "media-with-follow")] * 2


async def test_the_bytes_of_images_are_not_in_the_messages_and_the_plugins_headers_are_not_for_clients(rig):
    await talk(rig, 2)
    exported = await rig.get("/tokencache/v1/sessions/s/trajectories?text=true")
    written = json.dumps(exported)
    assert "base64" not in written
    assert written.count(f"media:{sha256(image(1))}") == 1, "a message is stored once"
    async with rig.http.post(rig.url + CHAT, json={"messages": [shown("EPISODE:see go", image(1))]}, headers={HEADER: "t"}) as answer:
        assert [name for name in answer.headers if name.lower().startswith("x-tokencache")] == []


def text(words):
    return {"type": "text", "text": words}


def sha256(part):
    return hashlib.sha256(base64.b64decode(part["image_url"]["url"].partition(",")[2])).hexdigest()


async def test_a_harness_cannot_supply_an_exact_prompt_itself(rig):
    exact = {"tokencache_prompt": {"ids": [1, 2, 3]}}
    status, said = await rig.post("s", messages=[shown("EPISODE:see go", image(1))], kv_transfer_params=exact)
    assert (status, said["error"]["param"]) == (400, "kv_transfer_params.tokencache_prompt")


CUT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def after_two_turns(rig):
    """A conversation that waits for its third reply. The proxy has learned the template, and makes no requests of its own."""
    messages = [shown("EPISODE:look go", image(1), image(2, width=60))]
    messages.append(echo(await rig.say("s", messages, tools=TOOLS)))
    messages += [*results(messages[-1]), shown("And this?", image(3, width=84))]
    messages.append(echo(await rig.say("s", messages, tools=TOOLS)))
    return [*messages, shown("And that?", image(4, width=60))]


@CUT
@pytest.mark.parametrize("after", [1, 3, 9])
async def test_a_reply_that_is_broken_off_goes_on_with_the_same_images(stream, after):
    async with proxied(seeing(derenders=True), hold=PATIENCE) as rig:
        messages = await after_two_turns(rig)
        rig.engine.faults.append(Fault.abort(after))
        said = await rig.say("s", messages, tools=TOOLS, stream=stream)
        assert (said["reasoning"] or "").strip() == "I look first — naïve café ☕."
        assert said["content"].strip() == "A house."
        assert said["tool_calls"]
        *_, cut = await rig.turns()
        assert ("continued" in cut["marks"], cut["match"]) == (True, "continue")
        *_, begun, rest = rig.ground_truth()
        assert rest.prompt_ids == begun.prompt_ids + begun.completion_ids[: len(rest.prompt_ids) - len(begun.prompt_ids)]
        assert (await rig.info())["incidents"] == []
        (sequence,) = (await rig.exported())["sequences"]
        assert [medium["length"] for medium in sequence["media"]] == [1, 3, 3, 3]
        assert sequence["turns"][-1]["turn"] == cut["turn"]
        for sent in rig.engine.derendered:
            assert "base64" not in json.dumps(sent), "parsers need no images"


async def test_a_reply_with_a_placeholder_in_it_goes_on_too():
    words = ["I draw <|image_pad|><|image_pad|> for you, and a house, and a tree."]
    engine = PluginEngine(episodes={"draw": words}, seed=7, images="plugin", derenders=True)
    async with proxied(engine, hold=PATIENCE) as rig:
        rig.engine.faults.append(Fault.abort(6))
        await rig.say("s", [shown("EPISODE:draw go", image(1))])
        (turn,) = await rig.turns()
        assert {"continued", "sampled-placeholder"} <= set(turn["marks"])
        assert rig.engine.requests[-1]["kv_transfer_params"]["tokencache_prompt"]["sampled"]


@pytest.mark.parametrize("fault", [ImageFault.REEXPANDED, ImageFault.WRONG_RANGES, ImageFault.NO_RANGES, ImageFault.NOT_FOUND])
@CUT
async def test_a_continuation_with_other_ids_or_places_is_not_used(stream, fault):
    """The reply is sampled anew if the client has nothing of it, or ends where it was broken off."""
    async with proxied(seeing(derenders=True), hold=PATIENCE) as rig:
        messages = await after_two_turns(rig)
        rig.engine.faults.append(Fault.abort(4))
        rig.engine.choose_fault = lambda _route, body: _after_a_cut(rig.engine, body, fault)
        await rig.post("s", messages=messages, tools=TOOLS, stream=stream)
        (cut,) = (turn for turn in await rig.turns() if turn["again"])
        assert "continued" not in cut["marks"]
        sampled = rig.ground_truth()[2]
        (tokens,) = (await rig.store.tokens("s", [cut["turn"]])).values()
        assert ids.unpack(tokens.completion) == sampled.completion_ids[:4]


def _after_a_cut(engine, body, fault):
    """Let the engine err in each request whose prompt ends with a part of a reply."""
    prompt = ((body.get("kv_transfer_params") or {}).get("tokencache_prompt") or {}).get("ids")
    begun = engine.ground_truth[-1]
    engine.images.fault = fault if prompt is not None and prompt == begun.prompt_ids + begun.completion_ids else None


@CUT
async def test_on_an_engine_without_the_plugin_the_turn_says_why_not(stream):
    engine = PluginEngine(episodes=EPISODES, seed=7, images="stock", derenders=True)
    async with proxied(engine, hold=PATIENCE) as rig:
        rig.engine.faults.append(Fault.abort(4))
        await rig.post("s", messages=[shown("EPISODE:see go", image(1))], stream=stream)
        assert "images" in (await rig.turns())[0]["again"]

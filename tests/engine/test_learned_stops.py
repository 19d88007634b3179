"""On an engine that cannot be made to sample a given id, stop ids are learned from replies, and only if a reply proves them."""

import pytest

from tests.proxy.kit import EPISODES, TOOLS, echo, proxied, results, user
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.model import Model
from tokencache.engine.probe import NO_END, Capability
from tokencache.engine.reply import Choice
from tokencache.engine.upstream import Upstream
from tokencache.store.base import LEARNED
from tokencache.store.memory import MemoryStore
from tokencache.testing import Fault, SimulatedEngine


def _refuse(route, body):
    asked = route == "/detokenize" or (isinstance(body, dict) and "allowed_token_ids" in body)
    return Fault.answer(400, path=route) if asked else None


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_turn_continues_nevertheless(stream):
    async with proxied(SimulatedEngine(choose_fault=_refuse)) as rig:
        messages = [user("EPISODE:demo")]
        for _ in range(4):
            message = await rig.say("s", messages, tools=TOOLS, stream=stream)
            messages += [echo(message), *results(message)]
            if not message.get("tool_calls"):
                messages.append(user("go on"))
        assert [turn["match"] for turn in await rig.turns("s")] == ["root", "continue", "continue", "continue"]
        await rig.check("s")


@pytest.mark.parametrize(
    ("last", "finish", "stop", "learned"),
    [
        (5, "stop", None, {5}),
        (5, "tool_calls", None, {5}),
        (5, "length", None, set()),
        (5, "stop", 5, {5}),  # the request named it; it is the template's end of turn all the same
        (5, "stop", 7, set()),
        (7, "stop", 7, set()),
        (5, "stop", "END", set()),
        (7, "tool_calls", None, set()),
        (7, "stop", None, set()),
    ],
)
def test_which_replies_prove_a_stop_id(last, finish, stop, learned):
    model = Model(Capability("m", "exact", stop_candidates=(5, 7), turn_ends=(5,)), Upstream("http://127.0.0.1:1"), Vllm())
    choice = Choice()
    choice.ids, choice.finish_reason, choice.stop_reason = [1, last], finish, stop
    model.observe(choice)
    assert model.stop_ids == learned


def base_model(**options):
    """An engine that stops at another id than its template writes, as a base model with the template of a tuned one."""
    return SimulatedEngine(episodes=EPISODES, eos="<|endoftext|>", **options)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("masks", [True, False])
async def test_a_base_model_whose_requests_name_the_end_of_turn(stream, masks):
    """A reply ends with the template's end of turn, because each request names it as a stop id."""
    engine = base_model(choose_fault=None if masks else _refuse)
    async with proxied(engine) as rig:
        messages = [user("EPISODE:demo")]
        for _ in range(4):
            message = await rig.say("s", messages, tools=TOOLS, stream=stream, stop_token_ids=[engine.tokenizer.stop_id])
            messages += [echo(message), *results(message)]
        assert [turn["match"] for turn in await rig.turns("s")] == ["root", "continue", "continue", "continue"]
        assert (await rig.readiness())["engine"]["models"][0]["level"] == "exact"
        await rig.check("s")


async def test_a_second_replica_and_a_restart_know_what_replies_showed():
    """The engine accepts no masks, so a probe cannot find its stop ids."""
    engine, store = SimulatedEngine(episodes=EPISODES, choose_fault=_refuse), MemoryStore()
    messages = [user("EPISODE:talk")]
    async with engine.serve() as up:
        async with proxied(store=store, upstream=up) as first, proxied(store=store, upstream=up) as second:
            messages += [echo(await first.say("s", messages)), user("go on")]
            await first.proxy.membership.synchronize()
            await second.proxy.engine.model()
            await second.proxy.membership.synchronize()
            messages += [echo(await second.say("s", messages)), user("go on")]
        async with proxied(store=store, upstream=up) as restarted:
            await restarted.say("s", messages)
        assert [turn.match for turn in await store.turns("s")] == ["root", "continue", "continue"]
        (entry,) = [entry for entry in await store.engines() if entry.replica == LEARNED]
        assert (entry.url, entry.stops) == (up, (("sim", (engine.tokenizer.stop_id,)),))


def test_what_another_template_ended_with_is_not_used():
    """The engine has another model now, under the same name."""
    model = Model(Capability("m", "exact", turn_ends=(5,)), Upstream("http://127.0.0.1:1"), Vllm(), learned={7})
    assert model.stop_ids == set()


def test_a_level_that_waits_for_a_reply():
    """Where no id is known to end a reply, the level is `record` until a reply shows one."""
    model = Model(Capability("m", "record", why=NO_END, turn_ends=(5,)), Upstream("http://127.0.0.1:1"), Vllm())
    choice = Choice()
    choice.ids, choice.finish_reason, choice.stop_reason = [1, 5], "stop", 5
    model.observe(choice)
    assert (model.capability.level, model.capability.why, model.stop_ids) == ("exact", "", {5})


async def test_a_base_model_that_goes_on_after_its_turn():
    """Its replies end with its own stop id, which the template does not write; they are exact all the same."""
    async with proxied(base_model()) as rig:
        messages = [user("EPISODE:talk")]
        for _ in range(3):
            message = await rig.say("s", messages)
            messages += [echo(message), user("go on")]
        assert [turn["match"] for turn in await rig.turns("s")] == ["root", "continue", "continue"]
        await rig.check("s")


async def test_a_template_that_closes_a_reply_with_two_special_tokens(monkeypatch):
    """Which of them its model samples last is not known, so nothing is spliced until a reply shows it."""
    engine = SimulatedEngine(episodes=EPISODES, eos="</tool_response>")
    template = engine.tokenizer.chat_template.replace("<|im_end|>", "<|im_end|><|endoftext|>")
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)  # all engines of this process share the tokenizer
    async with proxied(engine) as rig:
        messages = [user("EPISODE:talk")]
        for _ in range(2):
            message = await rig.say("s", messages)
            messages += [echo(message), user("go on")]
        assert [(turn["match"], turn["reason"]) for turn in await rig.turns("s")] == [("root", ""), ("plain", "record-only")]


async def test_white_space_before_the_end_of_turn_is_learned_from_no_reply(monkeypatch):
    """Nemotron Nano's template writes a newline before its end of turn; a reply that the limit cut may end with one."""
    engine = SimulatedEngine(episodes=EPISODES)
    monkeypatch.setattr(engine.tokenizer, "chat_template", engine.tokenizer.chat_template.replace("<|im_end|>", "\n<|im_end|>"))
    (newline,) = engine.tokenizer.encode("\n")
    async with proxied(engine) as rig:
        model = await rig.proxy.engine.model()
        choice = Choice()
        choice.ids, choice.finish_reason = [1, newline], "tool_calls"
        model.observe(choice)
        assert model.stop_ids == {engine.tokenizer.stop_id}

"""On an engine that cannot be made to sample a given id, stop ids are learned from replies, and only if a reply proves them."""

import pytest

from tests.proxy.kit import TOOLS, echo, proxied, results, user
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.model import Model
from tokencache.engine.probe import Capability
from tokencache.engine.reply import Choice
from tokencache.engine.upstream import Upstream
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
        (5, "stop", 5, set()),
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

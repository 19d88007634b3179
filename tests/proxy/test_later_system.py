"""Templates that take a system message at the front only, and harnesses that send them later (Claude Code's reminders)."""

import asyncio

from tests.proxy.kit import HEADER, proxied
from tests.support.waiting import PATIENCE, until
from tokencache.testing import SimulatedEngine
from tokencache.testing.errors import RefusalResponse

FIRST = [{"role": "user", "content": "EPISODE:talk"}]
REMINDER = {"role": "system", "content": [{"type": "text", "text": "The date has changed."}]}


class SystemFirst(SimulatedEngine):
    """As with Qwen3.5's template."""

    def _render(self, body, arguments):
        if any(entry["role"] == "system" for entry in body["messages"][1:]):
            raise RefusalResponse("System message must be at the beginning.")
        return super()._render(body, arguments)


async def ask(rig, messages):
    body = {"model": "sim", "max_tokens": 200, "system": "You lead.", "messages": messages}
    async with rig.http.post(rig.url + "/v1/messages", json=body, headers={HEADER: "s"}) as answer:
        assert answer.status == 200, await answer.text()
        return {"role": "assistant", "content": (await answer.json())["content"]}


async def conversation(rig):
    history = list(FIRST)
    for n in range(3):
        history += [await ask(rig, history), REMINDER, {"role": "user", "content": f"and {n}?"}]
    await ask(rig, history)
    assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue", "continue"]
    await rig.check()
    return rig.engine.tokenizer.decode(rig.ground_truth()[-1].prompt_ids)


async def test_where_the_template_takes_them_they_stay_in_place():
    async with proxied() as rig:
        assert (await rig.get("/readyz"))["engine"]["models"][0]["later_system"] is True
        assert "<|im_start|>system\nThe date has changed.<|im_end|>" in await conversation(rig)


async def test_where_it_does_not_the_user_is_reminded():
    engine = SystemFirst(episodes={"talk": [f"<think>\nhm\n</think>\n\nNumber {n}." for n in range(4)]}, seed=3)
    async with proxied(engine) as rig:
        assert (await rig.get("/readyz"))["engine"]["models"][0]["later_system"] is False
        said = await conversation(rig)
        assert "<|im_start|>user\n<system-reminder>\nThe date has changed.\n</system-reminder><|im_end|>" in said


async def test_a_call_that_waits_for_its_engine_is_rendered_as_the_template_accepts_it(monkeypatch):
    """What is known of an engine that is away still holds."""
    monkeypatch.setattr("tokencache.proxy.dispatch.FIRST_PAUSE", 0.01)
    engine = SystemFirst(episodes={"talk": [f"<think>\nhm\n</think>\n\nNumber {n}." for n in range(4)]}, seed=3)
    async with proxied(engine, hold=PATIENCE) as rig:
        history = [*FIRST, await ask(rig, FIRST), REMINDER, {"role": "user", "content": "and?"}]
        await until(lambda: known(rig))
        engine.pause()
        rig.proxy.engine.forget()
        asked = len(engine.requests)
        call = asyncio.create_task(ask(rig, history))
        await engine.until(lambda: len(engine.requests) > asked + 1)
        engine.resume()
        await call
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        await rig.check()


async def known(rig):
    return rig.proxy.pool.monitors[0].identity

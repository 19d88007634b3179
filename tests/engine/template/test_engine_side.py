"""Requests to the engine: renderings over HTTP, agreement of chat and `/tokenize`, candidates for stop ids."""

import contextlib
from functools import partial

import msgspec
import pytest

from tests.engine.template.shapes import TOOLS
from tests.engine.template.template_lab import KINDS, NO_ARGS, Lab
from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.probe import chat_prompt_ids, probe
from tokencache.engine.template.agreement import chat_agrees
from tokencache.engine.template.boundary import ASK
from tokencache.engine.template.renderer import EngineRenderer, RenderError, TemplateRefusedError
from tokencache.engine.upstream import EngineResponse, Upstream
from tokencache.errors import EngineError
from tokencache.testing import SimulatedEngine

WITH_TOOLS = RenderArgs(b"", b"", {}, {}, {}, msgspec.Raw(msgspec.json.encode(TOOLS)))


class Chat:
    """An engine whose chat completions render with one template, while `/tokenize` may use another."""

    def __init__(self, kind, change=lambda messages: messages, refuse=None):
        self.lab, self.change, self.refuse = Lab.of(kind), change, refuse
        self.calls = 0

    async def ask(self, body):
        self.calls += 1
        sent = msgspec.json.decode(msgspec.json.encode(body))
        if self.refuse is not None and len(sent["messages"]) > 1:
            return EngineResponse(self.refuse, b'{"error":{"message":"no"}}')
        text = self.lab.text(self.change(sent["messages"]), sent.get("tools"), generation=True)
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length", "token_ids": [5]}
        return EngineResponse(200, msgspec.json.encode({"choices": [choice], "prompt_token_ids": self.lab.words.encode(text)}))


@pytest.mark.parametrize("args", [NO_ARGS, WITH_TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_one_template_agrees_with_itself(kind, args):
    engine = Chat(kind)
    assert await chat_agrees(partial(chat_prompt_ids, engine.ask), Lab.of(kind), "m", args)
    assert engine.calls == 2


@pytest.mark.parametrize("args", [NO_ARGS, WITH_TOOLS], ids=["no tools", "tools"])
async def test_a_result_rendered_differently_is_found(args):
    """Harmony writes a tool's result as it is, gpt-oss's template as a JSON string; a question alone shows nothing of it."""

    def raw(messages):
        return [{**m, "content": "1"} if m["role"] == "tool" else m for m in messages]

    assert not await chat_agrees(partial(chat_prompt_ids, Chat(KINDS["gpt-oss"], raw).ask), Lab.of(KINDS["gpt-oss"]), "m", args)


@pytest.mark.parametrize(("status", "learned"), [(400, False), (422, False), (500, None)])
async def test_a_missing_answer_is_not_a_disagreement(status, learned):
    kind = KINDS["Qwen3"]
    assert await chat_agrees(partial(chat_prompt_ids, Chat(kind, refuse=status).ask), Lab.of(kind), "m", NO_ARGS) is learned

    class Gone(Lab):
        async def render(self, model, messages, args, *, generation):
            raise RenderError("nobody there")

    assert (
        await chat_agrees(partial(chat_prompt_ids, Chat(kind).ask), Gone(Lab.of(kind).template, Lab.of(kind).words), "m", NO_ARGS) is None
    )


async def test_a_template_that_writes_the_time_is_asked_again_and_so_is_an_engine_that_reports_no_ids():
    """Between the two renderings a minute ended, or a day: that is no difference between the routes."""

    class Clock(Lab):
        minutes = iter(["12:59 ", "13:00 "])

        async def render(self, model, messages, args, *, generation):
            rendered = await super().render(model, messages, args, generation=generation)
            return ids.pack(self.words.encode(next(self.minutes, "13:00 "))) + rendered

    class At13(Chat):
        async def ask(self, body):
            answer = (await super().ask(body)).json()
            return EngineResponse(200, msgspec.json.encode(answer | {"prompt_token_ids": time + answer["prompt_token_ids"]}))

    class Silent(Chat):
        async def ask(self, body):
            answer = (await super().ask(body)).json()
            return EngineResponse(200, msgspec.json.encode(answer | {"prompt_token_ids": None}))

    kind = KINDS["Qwen3"]
    clock, time = Clock(Lab.of(kind).template, Lab.of(kind).words), Lab.of(kind).words.encode("13:00 ")
    agrees = partial(chat_agrees, partial(chat_prompt_ids, At13(kind).ask), clock, "m", NO_ARGS)
    assert [await agrees(), await agrees()] == [None, True]
    assert await chat_agrees(partial(chat_prompt_ids, Silent(kind).ask), Lab.of(kind), "m", NO_ARGS) is None


@pytest.mark.parametrize("status", [503, 429])
async def test_a_temporary_error_is_raised_for_a_later_attempt(status):
    """Whoever asks waits: what is not known yet must not be taken for a difference."""
    with pytest.raises(EngineError) as why:
        await chat_agrees(partial(chat_prompt_ids, Chat(KINDS["Qwen3"], refuse=status).ask), Lab.of(KINDS["Qwen3"]), "m", NO_ARGS)
    assert why.value.passing


async def test_an_episode_that_both_refuse_counts_as_agreement_but_not_one_that_only_chat_refuses():
    class NoCalls(Lab):
        async def render(self, model, messages, args, *, generation):
            if len(messages) > 1:
                raise TemplateRefusedError("no")
            return await super().render(model, messages, args, generation=generation)

    kind = KINDS["Qwen3"]
    refusing = NoCalls(Lab.of(kind).template, Lab.of(kind).words)
    assert await chat_agrees(partial(chat_prompt_ids, Chat(kind).ask), refusing, "m", NO_ARGS)
    assert not await chat_agrees(partial(chat_prompt_ids, Chat(kind, refuse=400).ask), Lab.of(kind), "m", NO_ARGS)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [(400, b"{}", TemplateRefusedError), (422, b"{}", TemplateRefusedError), (503, b"{}", RenderError), (404, b"{}", RenderError)]
    + [(200, body, RenderError) for body in (b"x", b"{}", b'{"tokens":["a"]}', b'{"tokens":[99999999999]}')],
)
async def test_refusals_and_temporary_errors_are_distinguished(status, body, error):
    class Fixed:
        async def query(self, path, body_):
            return EngineResponse(status, body)

    with pytest.raises(RenderError) as caught:
        await EngineRenderer(Fixed()).render("m", [ASK], NO_ARGS, generation=True)
    assert type(caught.value) is error


@contextlib.asynccontextmanager
async def simulated(**settings):
    engine = SimulatedEngine(**settings)
    async with engine.serve() as url:
        upstream = Upstream(url)
        await upstream.open()
        try:
            yield engine, upstream
        finally:
            await upstream.close()


async def test_white_space_is_not_a_candidate_for_a_stop_id():
    async with simulated() as (engine, upstream):
        found = await probe(upstream, [Vllm()], "sim")
        newline = engine.tokenizer.encode("\n")
        assert len(newline) == 1
        assert found.level == "exact"
        assert not any(engine.tokenizer.decode([token]).isspace() for token in found.stop_candidates)
        assert newline[0] not in found.stop_candidates
        assert found.stop_ids == (engine.tokenizer.stop_id,)
        assert engine.tokenizer.stop_id in found.stop_candidates


async def test_an_engine_that_cannot_detokenize_keeps_its_candidates():
    async with simulated() as (engine, upstream):
        real = upstream.query

        async def query(path, body=None, headers=None):
            return EngineResponse(404, b"") if path == "/detokenize" else await real(path, body, headers)

        upstream.query = query
        found = await probe(upstream, [Vllm()], "sim")
        assert engine.tokenizer.encode("\n")[0] in found.stop_candidates
        assert found.stop_ids == (engine.tokenizer.stop_id,)


async def test_the_simulated_engine_agrees_with_itself():
    async with simulated() as (_, upstream):
        for args in (NO_ARGS, WITH_TOOLS):
            assert await chat_agrees(partial(chat_prompt_ids, partial(Vllm().ask, upstream)), EngineRenderer(upstream), "sim", args)


async def test_ids_are_packed_in_order():
    async with simulated() as (engine, upstream):
        rendered = await EngineRenderer(upstream).render("sim", [ASK], NO_ARGS, generation=True)
        assert ids.unpack(rendered) == engine.tokenizer.encode(engine.tokenizer.render([{"role": "user", "content": "."}]))

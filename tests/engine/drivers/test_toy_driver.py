"""Adds a driver from outside the package: one class, one line in the registry, and its engine continues sessions token for token."""

import contextlib
import json

import msgspec
import pytest
from aiohttp import web

from tests.engine.intermediary import Intermediary
from tests.proxy.kit import CHAT, EPISODES, TOOLS, echo, proxied, results, user
from tokencache.config import Settings
from tokencache.engine.drivers.base import Driver
from tokencache.engine.drivers.registry import DRIVERS, drivers
from tokencache.engine.drivers.vllm import members_with_ids
from tokencache.engine.template.renderer import EngineRenderer
from tokencache.testing import SimulatedEngine

RENDER = "/toy/render"


class ToyRenderer(EngineRenderer):
    """Renders on the toy engine's own route."""

    route = RENDER


class ToyDriver(Driver):
    """The toy engine takes a prompt as `exact_prompt`, reports ids as `used` and `sampled`, and renders on a route of its own."""

    name = "toy"
    how = "exact_prompt is the prompt"
    streams = False
    renderer = ToyRenderer

    def write(self, call, prompt):
        fields = {name: value for name, value in members_with_ids(call).items() if name not in {"stream", "stream_options"}}
        if prompt is not None:
            fields["exact_prompt"] = msgspec.Raw(b"[" + bytes(prompt.fragment) + b"]")
        return msgspec.json.encode(fields)

    def read(self, body):
        reply = json.loads(body)
        if "used" not in reply:
            return body
        reply["prompt_token_ids"] = reply.pop("used")
        for choice in reply["choices"]:
            choice["token_ids"] = choice.pop("sampled")
        return msgspec.json.encode(reply)

    def probe_members(self, question, reply, prompt):
        return {"messages": [msgspec.Raw(question)], "exact_prompt": prompt}


class ToyEngine(Intermediary):
    """Gives the engine at `upstream` the routes and members of a toy engine."""

    def __init__(self, upstream):
        super().__init__(upstream)
        self.prompts = []

    async def _pass(self, request):
        if request.path == "/tokenize":
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json() if request.can_read_body else None
        if request.path == CHAT and "exact_prompt" in body:
            self.prompts.append(body["exact_prompt"])
            body["kv_transfer_params"] = {"prompt_token_ids": body.pop("exact_prompt")}
        kept = {name: value for name, value in request.headers.items() if name in {"X-Request-Id", "X-Session-ID"}}
        path = "/tokenize" if request.path == RENDER else request.path
        async with self._http.request(request.method, self.upstream + path, json=body, headers=kept) as answer:
            reply = await answer.json(content_type=None)
        if request.path == CHAT and answer.status == 200:
            reply["used"] = reply.pop("prompt_token_ids")
            for choice in reply["choices"]:
                choice["sampled"] = choice.pop("token_ids")
        return web.json_response(reply, status=answer.status)


@contextlib.asynccontextmanager
async def before_a_toy_engine(kind):
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    async with engine.serve() as up:
        toy = ToyEngine(up)
        async with toy.serve() as url, proxied(None, upstream=url, engine_kind=kind) as rig:
            model = await rig.proxy.engine.model()
            rig.engine = engine
            toy.prompts.clear()
            engine.ground_truth.clear()
            yield rig, toy, model.capability


@pytest.fixture
def _registered(monkeypatch):
    monkeypatch.setitem(DRIVERS, "toy", lambda _options: ToyDriver())


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["toy", "auto"])
async def test_sessions_continue_on_exact_tokens(kind, stream):
    async with before_a_toy_engine(kind) as (rig, toy, found):
        assert (found.driver, found.level, found.how) == ("toy", "exact", "exact_prompt is the prompt")
        messages = [user("EPISODE:demo")]
        for _ in range(3):
            message = await rig.say("s", messages, tools=TOOLS, stream=stream)
            messages += [echo(message), *results(message)]
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        assert toy.prompts == [entry.prompt_ids for entry in rig.ground_truth()[1:]]
        assert [len(sequence["turns"]) for sequence in (await rig.check())["sequences"]] == [3]


async def test_without_its_driver_the_engine_is_only_relayed():
    async with before_a_toy_engine("auto") as (_, _, found):
        assert (found.level, found.honours_ids) == ("relay", False)


@pytest.mark.usefixtures("_registered")
def test_its_name_is_a_value_of_the_option():
    assert [driver.name for driver in drivers(Settings(engine="toy").engine, None)] == ["toy"]


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"'toy' is not an engine; known are auto, vllm, nemo-rl, nemo-gym, completions, generate, dynamo"):
        Settings(engine="toy")

"""The local tokenizer: it saves requests, and it is used only where it agrees with the engine."""

import asyncio
import json
import logging
import subprocess
import sys

import msgspec
import pytest
from typer.testing import CliRunner

from tests.engine.template.shapes import SHAPES, TOOLS, ask, parts, user
from tests.engine.template.template_lab import KINDS, Lab, vocabulary
from tests.proxy.kit import echo, proxied, results
from tokencache.cli import app
from tokencache.config import Settings
from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.template.agreement import SAMPLES, agreeing_local
from tokencache.engine.template.boundary import ASK
from tokencache.engine.template.learned import LearnedTemplate, TailRefusedError
from tokencache.engine.template.local import LARGE_BYTES, DeclinedError, LocalRenderer, LocalTokenizerError, prepare, prepare_tools, quieten
from tokencache.engine.template.renderer import EngineRenderer, RenderError, TemplateRefusedError
from tokencache.engine.template.tails import Tails
from tokencache.engine.upstream import Upstream
from tokencache.server.app import Proxy
from tokencache.testing import Fault, SimulatedEngine
from tokencache.testing.tokenizer import build_tokenizer

quieten()

PLAIN = RenderArgs(b"", b"", {}, {}, {})
RESULT = "'\\n<tool_response>\\n' + text + '\\n</tool_response>'"


def changed(old, new):
    template = build_tokenizer().chat_template
    assert old in template
    return template.replace(old, new)


OTHER_TEMPLATE = changed("'<|im_end|>\\n'", "'<|im_end|>\\n\\n'")
OTHER_SHAPE = changed(RESULT, RESULT.replace("text", "(text | replace('total', 'sum'))"))
OTHER_WORD = changed(RESULT, RESULT.replace("text", "(text | replace('xyzzy', 'plugh'))"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The simulated engine's own tokenizer, or one with another template."""
    made = {}

    def make(template=None):
        if template not in made:
            made[template] = tmp_path_factory.mktemp("tokenizer")
            build_tokenizer().save(made[template])
            path = made[template] / "tokenizer_config.json"
            config = json.loads(path.read_text("utf-8"))
            path.write_text(json.dumps(config | ({"chat_template": template} if template else {})), "utf-8")
        return made[template]

    return make


@pytest.fixture(scope="session")
def local(folder):
    return LocalRenderer(folder())


class Rig:
    """A simulated engine, and tails of it with and without the local tokenizer."""

    def __init__(self, engine, upstream):
        self.engine, self.upstream = engine, upstream
        self.truth = EngineRenderer(upstream)

    def tails(self, small=None, **settings):
        return Tails(LearnedTemplate(self.truth, {self.engine.tokenizer.stop_id}, small), **settings)

    async def asked(self, work):
        """What came of it, and how many times /tokenize was asked meanwhile."""
        before = len(self.engine.tokenizations)
        return await work, len(self.engine.tokenizations) - before


@pytest.fixture
async def rig():
    engine = SimulatedEngine()
    async with engine.serve() as url:
        upstream = Upstream(url)
        await upstream.open()
        yield Rig(engine, upstream)
        await upstream.close()


def asked_of(name):
    shape = SHAPES[name]
    return msgspec.structs.replace(ask(shape.messages, len(shape.history), len(shape.messages), tools=shape.tools), model="sim")


# --- agreement ---------------------------------------------------------------------------------------------------------


async def test_the_engines_own_tokenizer_agrees(rig, local, caplog):
    caplog.set_level(logging.INFO)
    found, requests = await rig.asked(agreeing_local(local, rig.truth, "sim"))
    assert found is local
    assert requests == len(SAMPLES)
    assert f"renders {len(SAMPLES)} conversations as the engine does" in caplog.text


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if not kind.kwargs], ids=lambda kind: kind.name)
async def test_every_template_is_rendered_as_vllm_does(kind, tmp_path):
    """With content in parts where the template wants that, developers and tools, and all the shapes that tails can have."""
    lab = Lab.of(kind)
    found = await agreeing_local(LocalRenderer(saved(kind, tmp_path)), lab, "m")
    assert found is not None
    refused = 0
    for name, shape in SHAPES.items():
        whole = ask(shape.messages, len(shape.history), len(shape.messages), tools=True)
        for args in (whole.args, msgspec.structs.replace(whole.args, tools=None)):
            messages = list(whole.raw)
            try:
                right = await lab.render("m", messages, args, generation=True)
            except TemplateRefusedError:
                refused += 1
                with pytest.raises(RenderError):
                    await found.render("m", messages, args, generation=True)
            else:
                assert await found.render("m", messages, args, generation=True) == right, name
    assert refused < len(SHAPES)


async def test_default_template_arguments_of_a_server_are_noticed(tmp_path):
    """What a server adds to every request (`--default-chat-template-kwargs`) is not known here."""
    kind = KINDS["Qwen3.5 nothink"]
    assert await agreeing_local(LocalRenderer(saved(kind, tmp_path)), Lab.of(kind), "m") is None


def saved(kind, where):
    lab = Lab.of(kind)
    vocabulary(kind.tokens).backend.save(str(where / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": lab.template, "clean_up_tokenization_spaces": False}
    (where / "tokenizer_config.json").write_text(json.dumps(config | ({"bos_token": kind.bos} if kind.bos else {})), "utf-8")
    return where


async def test_another_template_is_refused(rig, folder, caplog):
    assert await agreeing_local(LocalRenderer(folder(OTHER_TEMPLATE)), rig.truth, "sim") is None
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "NOT used for sim" in record.message
    assert "'plain' at token 11: " in record.message


async def test_an_engine_that_cannot_be_reached(rig, local, caplog):
    rig.engine.choose_fault = lambda route, body: Fault.answer(500, "x", path="/tokenize")
    assert await agreeing_local(local, rig.truth, "sim") is None
    assert "could not be compared" in caplog.text


async def test_an_engine_that_refuses_everything_proves_nothing(local, caplog):
    class No:
        async def render(self, *given, **how):
            raise TemplateRefusedError("no")

    assert await agreeing_local(local, No(), "sim") is None
    assert "the engine renders nothing" in caplog.text


# --- tails -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
async def test_tails_equal_the_engines_tails(rig, local, name):
    """With it, a tail costs no request once its shape is proven; without it, one."""
    with_it, without = rig.tails(local), rig.tails()
    if any(message["role"] in {"system", "developer"} for message in SHAPES[name].new) and "developer" in str(SHAPES[name]):
        for tails in (with_it, without):
            with pytest.raises(TailRefusedError, match="new-messages-reach-back"):
                await tails.tail(asked_of(name))
        return
    right, proof = await rig.asked(without.tail(asked_of(name)))
    first, local_proof = await rig.asked(with_it.tail(asked_of(name)))
    assert first == right
    assert local_proof == proof - 2  # the engine's small renderings, with the generation prompt and without, need not be proven, too
    assert await rig.asked(without.tail(asked_of(name))) == (right, 1)
    assert await rig.asked(with_it.tail(asked_of(name))) == (right, 0)
    assert with_it.template.renders["local"] == 4  # three for the proof


async def test_the_engine_is_asked_for_proofs_only(rig, local):
    counts = []
    for tails in (rig.tails(), rig.tails(local)):
        await tails.tail(asked_of("call → result"))
        _, requests = await rig.asked(asyncio.gather(*(tails.tail(asked_of("call → result")) for _ in range(130))))
        counts.append(requests)
    recheck = counts[1] // 2  # every 64th
    assert recheck == 4
    assert counts == [130 + 2 * (recheck + 1), 2 * recheck]


async def test_a_shape_that_differs_falls_back(rig, folder, caplog):
    """It agreed on the table, but writes the results of this shape otherwise: the engine's small renderings serve."""
    other = await agreeing_local(LocalRenderer(folder(OTHER_SHAPE)), rig.truth, "sim")
    assert other is not None
    tails, plain = rig.tails(other), rig.tails()
    for name in ("call → result", "two calls → two results"):
        right = await plain.tail(asked_of(name))
        for _ in range(2):
            assert await tails.tail(asked_of(name)) == right
        assert await rig.asked(tails.tail(asked_of(name))) == (right, 1)
    assert await rig.asked(tails.tail(asked_of("text → user"))) == (await plain.tail(asked_of("text → user")), 6)
    assert (await rig.asked(tails.tail(asked_of("text → user"))))[1] == 0  # other shapes are still its own
    assert [r.message.startswith("the local tokenizer gives other ids") for r in caplog.records if r.levelname == "WARNING"] == [True]


async def test_different_words_are_found_by_the_recheck(rig, folder, caplog):
    """What it says otherwise has the form of what was proven: the recheck finds it, and then it is used no more."""
    other = await agreeing_local(LocalRenderer(folder(OTHER_WORD)), rig.truth, "sim")
    tails, plain = rig.tails(other, recheck_every=2), rig.tails()
    one = asked_of("call → result")
    two = msgspec.structs.replace(one, raw=[*one.raw[: one.at], one.raw_new[0].replace(b"total", b"xyzzy")])
    await tails.tail(one)
    assert await rig.asked(tails.tail(one)) == (await plain.tail(one), 0)
    with pytest.raises(TailRefusedError, match="tail-not-proven"):
        await tails.tail(two)
    assert "no longer used" in caplog.text
    right = await plain.tail(two)
    for _ in range(3):
        assert await tails.tail(two) == right
    assert tails.template.renders["local"] == 6  # none after the recheck


async def test_declined_conversations_are_rendered_by_the_engine(rig, local):
    tails, plain = rig.tails(local, recheck_every=3), rig.tails()
    usual = asked_of("parts → parts")
    part = b'[{"type":"text","text":"And","x":1}]'
    unusual = msgspec.structs.replace(usual, raw=[*usual.raw[: usual.at], b'{"role":"user","content":' + part + b"}"])
    with pytest.raises(DeclinedError):
        await local.render("sim", unusual.raw_new, PLAIN, generation=True)
    await tails.tail(usual)
    assert await rig.asked(tails.tail(usual)) == (await plain.tail(usual), 0)
    right = await plain.tail(unusual)
    assert await rig.asked(tails.tail(unusual)) == (right, 1)
    assert (await tails.tail(unusual)) == right  # a recheck: nothing is wrong with it
    assert (await rig.asked(tails.tail(usual)))[1] == 0


# --- the renderer ------------------------------------------------------------------------------------------------------


async def test_large_texts_go_to_a_thread(rig, local, monkeypatch):
    threads = []
    to_thread = asyncio.to_thread

    async def noted(*given):
        threads.append(1)
        return await to_thread(*given)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    for size, in_threads in ((LARGE_BYTES // 2, 0), (LARGE_BYTES, 8)):
        large = msgspec.json.encode(user("naïve ☕ " * (size // 8)))
        right = await rig.truth.render("sim", [large], PLAIN, generation=True)
        rendered = await asyncio.gather(*(local.render("sim", [large], PLAIN, generation=True) for _ in range(8)))
        assert set(rendered) == {right}
        assert len(threads) == in_threads


async def test_arguments_that_only_the_engine_understands(local):
    plainly = await local.render("sim", [ASK], PLAIN, generation=True)
    thoughtless = msgspec.structs.replace(PLAIN, kwargs={"enable_thinking": False, "unknown": 1})
    assert (await local.render("sim", [ASK], thoughtless, generation=True)).startswith(plainly)
    members = {"add_special_tokens": msgspec.Raw(b"true")}
    for args in (msgspec.structs.replace(PLAIN, members=members), msgspec.structs.replace(PLAIN, kwargs={"chat_template": "x"})):
        with pytest.raises(DeclinedError):
            await local.render("sim", [ASK], args, generation=True)
    with pytest.raises(RenderError):
        await local.render("sim", [], PLAIN, generation=True)
    with pytest.raises(RenderError):
        await local.render("sim", [ASK], msgspec.structs.replace(PLAIN, tools=msgspec.Raw(b'{"a":1}')), generation=True)


PREPARED = {
    "parts": (parts(user(), "a", "", "b"), {"content": "a\nb"}, {"content": [{"type": "text", "text": t} for t in ("a", "", "b")]}),
    "a result is always text": (
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"content": "a\nb"},
    ),
    "other texts": ({"role": "user", "content": ["a", {"type": "refusal", "refusal": "b"}]}, {"content": "a\nb"}),
    "no content": ({"role": "assistant"}, {"content": ""}, {"content": []}),
    "no calls": ({"role": "assistant", "content": "a", "tool_calls": []}, {"content": "a"}, {"content": [{"type": "text", "text": "a"}]}),
    "reasoning": (
        {"role": "assistant", "content": "", "reasoning_content": "r"},
        {"content": "", "reasoning": "r", "reasoning_content": "r"},
        {"content": [{"type": "text", "text": ""}], "reasoning": "r", "reasoning_content": "r"},
    ),
    "a bill": ({"role": "system", "content": "x-anthropic-billing-header: 1\nBe kind."}, {"content": "Be kind."}),
    "a bill alone": ({"role": "system", "content": "x-anthropic-billing-header: 1"}, {"content": ""}, {"content": []}),
    "a name": ({"role": "user", "name": "Jo", "content": "a"}, {"content": "a", "name": "Jo"}),
}


@pytest.mark.parametrize("case", PREPARED.values(), ids=PREPARED)
def test_messages_are_prepared_as_by_vllm(case):
    message, text, *in_parts = case
    assert prepare([msgspec.json.encode(message)], parts=False, developer=False) == [{"role": message["role"], **text}]
    if not in_parts and message["role"] != "tool":
        in_parts = [{**text, "content": [{"type": "text", "text": t} for t in text["content"].split("\n")]}]
    right = {"role": message["role"], **(in_parts[0] if in_parts else text)}
    assert prepare([msgspec.json.encode(message)], parts=True, developer=False) == [right]


@pytest.mark.parametrize(
    ("text", "value"),
    [('{"b": 1e5, "a": 12345678901234567890123}', {"b": 1e5, "a": 12345678901234567890123}), ("{", {}), ("[1]", {}), ("", {})],
)
def test_arguments_are_objects_and_members_keep_their_order(text, value):
    call = {"index": 1, "type": "function", "function": {"name": "f", "x": 1, "arguments": text}, "id": "a"}
    [message] = prepare([msgspec.json.encode({"role": "assistant", "tool_calls": [call]})], parts=False, developer=False)
    right = {"id": "a", "function": {"arguments": value, "name": "f", "x": 1}, "type": "function", "index": 1}
    assert json.dumps(message["tool_calls"]) == json.dumps([right])


def test_developer_messages():
    talk = [msgspec.json.encode({"role": role, "content": role}) for role in ("developer", "user", "system")]
    assert [m["role"] for m in prepare(talk, parts=False, developer=True)] == ["developer", "user", "system"]
    assert prepare(talk, parts=False, developer=False) == [
        {"role": "system", "content": "developer\n\nsystem"},
        {"role": "user", "content": "user"},
    ]
    assert [m["content"] for m in prepare(talk[:2], parts=False, developer=False)] == ["developer", "user"]


def test_tools_have_fixed_members():
    tools = [
        {"function": {"parameters": {"b": 1, "a": 2}, "name": "f", "x": 1, "strict": None}, "y": 1},
        {"function": {"name": "g", "strict": True}},
    ]
    shown = [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}}},
        {"type": "function", "function": {"name": "g", "description": None, "parameters": None, "strict": True}},
    ]
    assert json.dumps(prepare_tools(json.dumps(tools).encode())) == json.dumps(shown)
    assert prepare_tools(None) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"{", b'"a"', b'{"content":"a"}', b'{"role":"critic","content":"a"}', b'{"role":"user"}', b'{"role":"user","content":5}',
        b'{"role":"developer","content":"a","tools":[]}', b'{"role":"user","content":[{"type":"image_url","image_url":"x"}]}',
        b'{"role":"user","content":[{"type":"text"}]}', b'{"role":"assistant","reasoning":5}', b'{"role":"assistant","tool_calls":5}',
        b'{"role":"assistant","tool_calls":["x"]}', b'{"role":"assistant","tool_calls":[{"id":"a","type":"custom","function":{}}]}',
        b'{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":{}}}]}',
    ],
)  # fmt: skip
def test_unusual_messages_are_declined(raw):
    with pytest.raises(DeclinedError):
        prepare([raw], parts=False, developer=False)


@pytest.mark.parametrize("raw", [b"5", b"[5]", b'[{"type":"function"}]', b'[{"function":{"name":"f"},"defer_loading":true}]'])
def test_tools_that_are_declined(raw):
    with pytest.raises(DeclinedError):
        prepare_tools(raw)


# --- in a proxy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["without", "with", "another template"])
async def test_in_a_proxy(how, folder, caplog):
    """A session's calls are continued as ever; with it, sessions after the first ask /tokenize nothing."""
    caplog.set_level(logging.INFO)
    tokenizer = {"without": None, "with": folder(), "another template": folder(OTHER_TEMPLATE)}[how]
    async with proxied(tokenizer=tokenizer) as rig:
        used = how == "with"
        requests = []
        for session in ("a", "b", "c"):
            before = len(rig.engine.tokenizations)
            messages = [user("EPISODE:demo")]
            for _ in range(4):
                message = await rig.say(session, messages, tools=TOOLS)
                messages += [echo(message), *results(message)]
            requests.append(len(rig.engine.tokenizations) - before)
            turns = await rig.turns(session)
            assert [turn["match"] for turn in turns] == ["root", *["continue"] * 3]
            assert (await rig.check(session))["complete"]
        assert requests[1:] == ([0, 0] if used else [3, 3])
        async with rig.http.get(f"{rig.url}/readyz") as answer:
            [model] = (await answer.json())["engine"]["models"]
        assert model["local_tokenizer"] is used
        assert f"local_tokenizer={used}" in caplog.text


def test_without_a_tokenizer_transformers_is_not_imported():
    code = "import tokencache.cli, sys; sys.exit(bool({'transformers', 'tokenizers', 'jinja2', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("what", ["no folder", "no tokenizer", "no template", "no extra"])
def test_an_unusable_tokenizer_is_an_error_at_start(what, folder, tmp_path, monkeypatch):
    path, words = tmp_path, "can be loaded"
    if what == "no folder":
        path, words = tmp_path / "x", "is no folder"
    elif what == "no template":
        build_tokenizer().save(path)
        config = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
        del config["chat_template"]
        (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    elif what == "no extra":
        path, words = folder(), "pip install '.[local]'"
        monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(LocalTokenizerError, match=words.replace("[", r"\[")):
        Proxy(Settings(tokenizer=path))
    said = CliRunner().invoke(app, ["serve", "--port", "0"], env={"TOKENCACHE_TOKENIZER": str(path)})
    assert said.exit_code == 1
    assert words.split()[0] in said.output


def test_packed_ids_equal_the_tokenizers(local):
    packed = asyncio.run(local.render("sim", [ASK], PLAIN, generation=True))
    assert build_tokenizer().decode(ids.unpack(packed)) == "<|im_start|>user\n.<|im_end|>\n<|im_start|>assistant\n"

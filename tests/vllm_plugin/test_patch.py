"""Which versions of vLLM are patched, which are left alone, and what is logged."""

import functools
import logging
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

from tests.engine.template.template_lab import KINDS
from tests.vllm_plugin.kit import Renderer, Request, older, vllm
from tokencache_vllm import entry
from tokencache_vllm.patch import UnknownVllmError, patch

ONLINE, SERVING = "vllm.renderers.online_renderer", "vllm.entrypoints.serve.render.serving"


def method(load, version):
    module, name = (ONLINE, "OnlineRenderer") if version >= "0.25" else (SERVING, "OpenAIServingRender")
    return getattr(load(module), name).preprocess_chat


@pytest.mark.parametrize("version", ["0.20.0", "0.22.1", "0.24.0", "0.25.0", "0.25.1+cpu", "0.26.0", "0.26.1rc1"])
def test_versions_that_are_patched_once(version):
    load = vllm()
    done = patch(version, load)
    assert done.where.endswith(".preprocess_chat")
    once = method(load, version)
    assert once is not Renderer.preprocess_chat
    assert patch(version, load) == done
    assert method(load, version) is once


@pytest.mark.parametrize("version", ["0.27.0", "0.32.0", "0.33.0", "1.0.0"])
def test_versions_that_need_nothing(version):
    load = vllm()
    assert not patch(version, load).where
    assert method(load, version) is Renderer.preprocess_chat


@pytest.mark.parametrize("version", ["0.19.1", "0.10.2", "0.1.dev123", "dev", ""])
def test_versions_that_are_unknown(version):
    load = vllm()
    with pytest.raises(UnknownVllmError):
        patch(version, load)
    assert method(load, "0.25.1") is Renderer.preprocess_chat


def one_class(**members):
    return {"vllm__renderers__online_renderer": {"OnlineRenderer": type("OnlineRenderer", (), members)}}


async def fewer(self, request, messages):
    """A `preprocess_chat` with other parameters."""


UNEXPECTED = {
    "no such class": {"vllm__renderers__online_renderer": {}},
    "no such method": one_class(),
    "other parameters": one_class(preprocess_chat=fewer),
    "not a coroutine": one_class(preprocess_chat=lambda self, request, messages: None),
    "another renderer": {"vllm__renderers__base": {"BaseRenderer": type("BaseRenderer", (), {"render_chat_async": fewer})}},
    "no tokens_input": {"vllm__inputs__engine": {}},
}


@pytest.mark.parametrize("unexpected", UNEXPECTED)
def test_unexpected_code_is_left_alone(unexpected):
    load = vllm(**UNEXPECTED[unexpected])
    before = getattr(getattr(load(ONLINE), "OnlineRenderer", None), "preprocess_chat", None)
    with pytest.raises(UnknownVllmError):
        patch("0.25.1", load)
    assert getattr(getattr(load(ONLINE), "OnlineRenderer", None), "preprocess_chat", None) is before


async def test_the_older_signature():
    load = vllm(
        **{SERVING.replace(".", "__"): {"OpenAIServingRender": type("S", (), {"preprocess_chat": older, "__init__": Renderer.__init__})}}
    )
    patch("0.20.0", load)
    serving = load(SERVING).OpenAIServingRender(KINDS["Qwen3"])
    request = Request(kv_transfer_params={"prompt_token_ids": [5, 6]})
    _, (prompt,) = await serving.preprocess_chat(request, [{"role": "user", "content": "x"}], None, "auto", None, reasoning_parser=None)
    assert prompt["prompt_token_ids"] == [5, 6]


async def test_a_vllm_that_renders_elsewhere_fails_loudly():
    @functools.wraps(Renderer.preprocess_chat)
    async def elsewhere(self, request, messages, *_rest, **_named):
        return messages, [{"prompt_token_ids": [1]}]

    load = vllm(**one_class(preprocess_chat=elsewhere, __init__=Renderer.__init__))
    patch("0.25.1", load)
    online = load(ONLINE).OnlineRenderer(KINDS["Qwen3"])
    with pytest.raises(RuntimeError, match="would have been lost"):
        await online.preprocess_chat(Request(kv_transfer_params={"prompt_token_ids": [5]}), [], None, "auto", None)


@pytest.fixture
def inside(monkeypatch, caplog):
    """Makes this process one of vLLM's; lists what is patched."""
    caplog.set_level(logging.INFO)

    def become(version, *, process="MainProcess", plugins=None, load=None):
        patched = []
        monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=version))
        monkeypatch.setattr(entry.multiprocessing, "current_process", lambda: types.SimpleNamespace(name=process))
        monkeypatch.setattr(entry, "patch", lambda found: (patched.append(found), patch(found, load or vllm()))[1])
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if plugins is not None:
            monkeypatch.setenv("VLLM_PLUGINS", plugins)
        return patched

    return become


async def start(version):
    """Load what vLLM loads by the plugin's name."""
    entry.register()
    if tuple(int(part) for part in version.split(".")[:2]) >= (0, 26):
        await entry.EndpointPlugin().init_state(None, None, None)


@pytest.mark.parametrize("version", ["0.20.0", "0.25.1", "0.26.0"])
async def test_patched_once_and_logged_once(inside, caplog, version):
    patched = inside(version, plugins="tokencache")
    await start(version)
    assert patched == [version]
    (said,) = caplog.messages
    assert version in said
    assert "wrapped vllm." in said


async def test_endpoint_plugins_must_be_named(inside, caplog):
    patched = inside("0.26.0")
    entry.register()  # vLLM loads no endpoint plugin that is not named
    assert patched == []
    assert "NOT ACTIVE" in caplog.text
    assert "VLLM_PLUGINS=tokencache" in caplog.text


@pytest.mark.parametrize("process", ["EngineCore", "EngineCore_DP1", "VllmWorker-0", "DPCoordinator"])
def test_processes_that_serve_no_http_are_left_alone(inside, caplog, process):
    assert inside("0.25.1", process=process) == []
    entry.register()
    assert caplog.messages == []


async def test_native_versions_are_left_alone_and_logged(inside, caplog):
    inside("0.31.0", plugins="tokencache")
    await start("0.31.0")
    assert caplog.messages == ["tokencache: vLLM 0.31.0 accepts prompt_token_ids by itself; nothing was changed"]


@pytest.mark.parametrize("version", ["0.19.0", "0.1.dev9", "0.25.1", "0.26.0"])
async def test_an_unknown_vllm_starts_unchanged(inside, caplog, version):
    inside(version, plugins="tokencache", load=vllm(**UNEXPECTED["other parameters"]))
    await start(version)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "NOT ACTIVE" in record.message


def test_vllm_loads_it_by_these_names():
    """The entry points of the plugin's own metadata."""
    project = tomllib.loads((Path(__file__).parents[2] / "vllm_plugin/pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"tokencache": "tokencache_vllm.entry:register"}
    assert project["entry-points"]["vllm.endpoint_plugins"] == {"tokencache": "tokencache_vllm.entry:EndpointPlugin"}
    assert project["dependencies"] == ["cachetools"], "vLLM has it, too"


def test_nothing_of_the_proxy_is_imported():
    """It is loaded in vLLM's processes, and must not need their environment or slow down their start."""
    code = "import sys; import tokencache_vllm.entry; print([m for m in sys.modules if m.partition('.')[0] in "
    code += "('aiohttp', 'msgspec', 'pydantic', 'redis', 'tokencache', 'vllm')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert done.stdout.strip() == "[]"

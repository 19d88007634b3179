"""One real vLLM for the whole suite. See rig/ for what it serves."""

import os
import subprocess

import pytest
from rig.miniswe import WRITE_AND_LIST
from rig.model import make_model
from rig.server import REPOSITORY, VllmServer, default_venv

QWEN3 = REPOSITORY.parent / "shared/tokenizers/qwen3/build.py"

EPISODES = {
    "hello": [
        "<think>\nA greeting wants a greeting.\n</think>\n\nHello there, friend — naïve café ☕.  ",
        "Once more, without thinking.",
        "<think>\nEnough.\n</think>\n\nGoodbye.",
    ],
    "tools": {
        "turns": [
            (
                "<think>\nI should list the files first.\n</think>\n\n  Let me look — naïve café ☕.\n"
                '<tool_call>\n{"name": "bash",  "arguments": {"timeout": 10, "command": "ls  -la\\n"}}\n</tool_call>'
            ),
            (
                "<think>\nNow write.\n</think>\n\n"
                '<tool_call>\n{"name": "bash", "arguments": {"command": "echo hi > a.txt"}}\n</tool_call>\n'
                '<tool_call>\n{"name": "bash", "arguments": {"command": "cat a.txt"}}\n</tool_call>'
            ),
            "<think>\nDone.\n</think>\n\nAll done.  ",
        ],
        "side": "Side answer.",
    },
    "badcall": [
        '<tool_call>\n{"name": "bash", "arguments": {"command": oops}}\n</tool_call>',
        "<think>\nThat was no JSON.\n</think>\n\nSorry.",
    ],
    "long": ["<think>\nhm\n</think>\n\n" + "word and word " * 2000],
    "miniswe": WRITE_AND_LIST,
}


@pytest.fixture(scope="session")
def episodes():
    """Scripted turns by name: one dictionary for all, as one server reads it once. Who needs others adds them above."""
    return EPISODES


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny model around the project's own tokenizer; around Qwen3's with `TOKENCACHE_E2E_TOKENIZER=qwen3`."""
    tokenizer, model = tmp_path_factory.mktemp("tokenizer"), tmp_path_factory.mktemp("model")
    if os.environ.get("TOKENCACHE_E2E_TOKENIZER", "own") == "qwen3":
        subprocess.run([str(default_venv() / "bin/python"), str(QWEN3), str(tokenizer)], check=True, stdin=subprocess.DEVNULL)
    else:
        from tokencache.testing.tokenizer import build_tokenizer

        build_tokenizer().save(tokenizer)
    return make_model(tokenizer, model)


@pytest.fixture(scope="session")
def vllm_server(model_dir, episodes, tmp_path_factory):
    """The running server with all that is known of it: log, port, model folder."""
    with VllmServer(model_dir, episodes, max_model_len=32768, workdir=tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="session")
def vllm(vllm_server):
    """URL of a real vLLM without a trailing slash or `/v1`."""
    return vllm_server.url

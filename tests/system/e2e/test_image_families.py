"""Exact prompts with images in vLLM's own renderer, without an engine: six families of models, each with its own placeholders.

With the plugin, and as the compact ids that `/inference/v1/generate` expands.
"""

import base64
import copy
import json
import os
import subprocess
from itertools import pairwise

import pytest
from rig.server import HERE, REPOSITORY, default_venv
from rig.vision import png
from rig.vision_families import FAMILIES, make_family

REPLY = "A\n\n\npicture."
"""Gemma 3's own replacement would merge its newlines, if they were not one token."""


def image(width, height, seed):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png(width, height, seed)).decode()}}


def text(words):
    return {"type": "text", "text": words}


MESSAGES = [
    {"role": "user", "content": [text("What is\n\n"), image(60, 60, 1), text("\n\n\nthis?\n")]},
    {"role": "assistant", "content": REPLY},
    {"role": "user", "content": [image(140, 60, 2), image(200, 150, 3), text("And these?")]},
]
IMAGES = 3
QUESTIONS = [
    {"role": "user", "content": [text(f"Question {turn}."), *(image(60 + 40 * turn, 60, seed) for seed in range(turn % 3)), text("So?")]}
    for turn in range(1, 5)
]
"""Four questions: with one image, with two, without any, with one."""


def changed(change):
    messages = copy.deepcopy(MESSAGES)
    change(messages[2]["content"])
    return messages


REQUESTS = {
    "own": {"messages": MESSAGES},
    "drift": {"messages": MESSAGES, "drift": REPLY},
    "places": {"messages": MESSAGES, "drift": REPLY, "ranges": 0},
    "sampled": {"messages": MESSAGES, "drift": REPLY, "sampled": "named"},
    "hidden": {"messages": MESSAGES, "drift": REPLY, "sampled": "hidden"},
    "elsewhere": {"messages": MESSAGES, "ranges": 1},
    "compact": {"messages": MESSAGES, "compact": True},
    "generate": {"messages": MESSAGES, "drift": REPLY, "generate": True},
    "chain": {"chain": QUESTIONS, "drift": REPLY},
    "one too many": {"supplied": MESSAGES, "messages": changed(lambda content: content.append(image(60, 60, 4)))},
    "one too few": {"supplied": MESSAGES, "messages": changed(lambda content: content.pop(1))},
    "none": {"supplied": MESSAGES, "messages": [{"role": "user", "content": "What is this?"}]},
}


@pytest.fixture(scope="module")
def answers(servers, tmp_path_factory):
    """Family → request → what vLLM's engine would get: for all families from one process, because its imports take longest."""
    folder, tokenizer = tmp_path_factory.mktemp("families"), servers.tokenizer_dir("own")
    models = [make_family(family, tokenizer, folder / family) for family in FAMILIES]
    requests = folder / "requests.json"
    requests.write_text(json.dumps(REQUESTS), encoding="utf-8")
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    path = {"PYTHONPATH": ":".join(map(str, (REPOSITORY, REPOSITORY / "vllm_plugin", default_venv().absolute() / "torchvision")))}
    done = subprocess.run(
        [str(default_venv().absolute() / "bin/python"), str(HERE / "render_images.py"), str(requests), *map(str, models)],
        env=os.environ | quiet | path | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=FAMILIES)
def answered(request, answers):
    """Request → answer of one family."""
    return answers[request.param]


def test_vllms_own_ids_give_vllms_own_prompt(answered):
    answer = answered["own"]
    assert answer["given"] == answer["own"]
    assert len(answer["own"]["places"]) == len(set(answer["own"]["hashes"])) == IMAGES


@pytest.mark.parametrize("request_name", ["drift", "places"])
def test_ids_that_no_rendering_has_are_the_prompt(answered, request_name):
    own, sent, given = (answered[request_name][part] for part in ("own", "sent", "given"))
    assert given["ids"] == sent != own["ids"]
    assert (given["masks"], given["hashes"]) == (own["masks"], own["hashes"])
    more = len(sent) - len(own["ids"])
    (first, *others) = own["places"]
    assert given["places"] == [first, *([start + more, length] for start, length in others)]


def test_a_sampled_placeholder_is_an_ordinary_token(answered):
    own, sent, given = (answered["sampled"][part] for part in ("own", "sent", "given"))
    assert (given["ids"], given["masks"], given["hashes"]) == (sent, own["masks"], own["hashes"])
    assert "`sampled`" in answered["hidden"]["refused"]


REFUSALS = {
    "elsewhere": "`ranges` has",
    "compact": f"have {IMAGES} of kind image",
    "one too many": f"have {IMAGES + 1} of kind image",
    "one too few": "",  # the second run is not found, or is found and leaves ids outside
    "none": "stands for an image",
}


@pytest.mark.parametrize(("request_name", "why"), REFUSALS.items())
def test_images_and_ids_that_do_not_belong_together_are_refused(answered, request_name, why):
    answer = answered[request_name]
    assert why in answer["refused"]
    assert answer["parameter"] == "kv_transfer_params.tokencache_prompt"


def test_compact_ids_give_the_prompt_but_for_gemma_3(answers):
    """Gemma 3's replacement merges newlines in the whole prompt, also those that the model sampled one by one."""
    exact = {}
    for family, answered in answers.items():
        answer = answered["generate"]
        exact[family] = answer.get("given") == {**answer["own"], "ids": answer.get("sent")}
    assert exact == {family: family != "gemma3" for family in FAMILIES}


@pytest.mark.parametrize("way", ["plugin", "generate"])
def test_every_turn_of_a_conversation_extends_the_one_before(answers, way):
    """By what the engine would get. Without the plugin Gemma 3 is not served."""
    for family, answered in answers.items():
        if way == "generate" and family == "gemma3":
            continue
        turns = answered["chain"]
        assert len(turns) == len(QUESTIONS)
        assert [turn[way] for turn in turns] == [turn["sent"] for turn in turns], family
        for before, after in pairwise(turns):
            assert after[way][: len(before["sent"])] == before["sent"], family

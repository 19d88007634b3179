"""The detokenizer that starts with the end of a prompt, against one that starts with all of it."""

import functools
import random
import types

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.decoders import DecodeStream

from tests.engine.template.template_lab import qwen_backend
from tests.support.material import require
from tokencache.testing import build_tokenizer
from tokencache_vllm.detokenizer import patch_detokenizer, sufficient_end
from tokencache_vllm.patch import UnknownVllmError
from tokencache_vllm.response_headers import ResponseHeaders, served

TEXTS = (
    "plain words, then ",
    "naïve café ☕ ",
    "👩‍👩‍👧‍👦",
    "日本語のテキスト",
    "<|im_start|>assistant\n",
    "\n\n\t",
    "\ufffd",
    "e\u0301",
    " ",
)
OWN = build_tokenizer().backend


@functools.cache
def tokenizer_of(name):
    return OWN if name == "own" else require("../shared", qwen_backend())


def some_ids(rng, tokenizer, pieces):
    """Ids as a template and a model make them: tokens of texts, single bytes of characters, special tokens, and any ids."""
    ids = []
    for _ in range(pieces):
        text = rng.choice(TEXTS)
        kind = rng.random()
        if kind < 0.5:
            ids += tokenizer.encode(text, add_special_tokens=False).ids
        elif kind < 0.8:  # a character in several tokens, perhaps cut off
            whole = [token for char in text for token in tokenizer.encode(char, add_special_tokens=False).ids]
            ids += whole[: rng.randint(0, len(whole))]
        else:
            ids.append(rng.randrange(tokenizer.get_vocab_size()))
    return ids


def streamed(tokenizer, prompt, reply, *, skips):
    """The text of a reply, token by token, or the error that ends it."""
    stream, texts = DecodeStream(ids=prompt, skip_special_tokens=skips), []
    for token in reply:
        try:
            texts.append(stream.step(tokenizer, token))
        except Exception as why:  # noqa: BLE001 - the library raises this class
            return [*texts, str(why)]
    return texts


@pytest.mark.parametrize("name", ["own", "qwen3"])
@pytest.mark.parametrize("skips", [True, False])
def test_a_reply_has_the_same_text_after_the_end_of_its_prompt(name, skips):
    tokenizer, shortened = tokenizer_of(name), 0
    for seed in range(1500):
        rng = random.Random(f"{name} {seed}")
        prompt, reply = some_ids(rng, tokenizer, 12) or [0], some_ids(rng, tokenizer, 6)
        end = sufficient_end(tokenizer, prompt, skip_special_tokens=skips)
        if end is None:
            continue
        assert end == prompt[len(prompt) - len(end) :]
        assert len(end) <= 16
        shortened += len(end) < len(prompt)
        assert streamed(tokenizer, end, reply, skips=skips) == streamed(tokenizer, prompt, reply, skips=skips), seed
    assert shortened > 500


def test_the_comparison_finds_an_end_that_begins_within_a_character():
    prompt = OWN.encode("Well ☕", add_special_tokens=False).ids
    reply = OWN.encode(" ok", add_special_tokens=False).ids
    assert streamed(OWN, prompt[-1:], reply, skips=True) != streamed(OWN, prompt, reply, skips=True)
    assert sufficient_end(OWN, [5] * 20 + prompt[1:], skip_special_tokens=True) == ([5] * 20 + prompt[1:])[-16:]


def test_a_prompt_that_ends_within_a_character_is_used_whole():
    prompt = OWN.encode("Well ☕", add_special_tokens=False).ids[:-1]
    assert OWN.decode(prompt).endswith("\ufffd")
    assert sufficient_end(OWN, prompt, skip_special_tokens=True) is None


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), None])
def test_other_decoders_get_the_whole_prompt(decoder):
    tokenizer = Tokenizer.from_str(OWN.to_str())
    tokenizer.decoder = decoder
    assert sufficient_end(tokenizer, OWN.encode("some words").ids, skip_special_tokens=True) is None


def test_a_prompt_without_text_is_used_whole():
    special = [OWN.token_to_id("<|im_start|>")] * 20
    assert sufficient_end(OWN, special, skip_special_tokens=True) is None
    assert sufficient_end(OWN, special, skip_special_tokens=False)


def patched():
    """vLLM's class, patched."""

    def __init__(self, tokenizer, request):  # noqa: N807 - it becomes the constructor
        self.started_with, self.request = request.prompt_token_ids, request

    made = type("FastIncrementalDetokenizer", (), {"__init__": __init__})
    module = types.SimpleNamespace(FastIncrementalDetokenizer=made)
    patch_detokenizer({"vllm.v1.engine.detokenizer": module}.__getitem__)
    patch_detokenizer({"vllm.v1.engine.detokenizer": module}.__getitem__)
    return made


async def started(prefixed):
    """What the detokenizer of a long prompt starts with, and what the engine gets."""
    params = types.SimpleNamespace(skip_special_tokens=True)
    request = types.SimpleNamespace(prompt_token_ids=OWN.encode("word " * 50).ids, sampling_params=params)
    found = []

    async def application(_scope, _receive, _send):
        served().prefixed = prefixed
        found.append(patched()(types.SimpleNamespace(_tokenizer=OWN), request).started_with)

    await ResponseHeaders(application)({"type": "http"}, None, None)
    return found[0], request.prompt_token_ids


async def test_only_prompts_by_hash_are_shortened_and_the_engine_gets_all_of_them():
    short, whole = await started(prefixed=object())
    assert short == whole[-16:]
    assert len(whole) > 16
    assert await started(prefixed=None) == (whole, whole)


def test_unexpected_code_is_left_alone():
    def __init__(self, other):  # noqa: N807 - it becomes the constructor
        pass

    made = type("FastIncrementalDetokenizer", (), {"__init__": __init__})
    with pytest.raises(UnknownVllmError, match="FastIncrementalDetokenizer"):
        patch_detokenizer({"vllm.v1.engine.detokenizer": types.SimpleNamespace(FastIncrementalDetokenizer=made)}.__getitem__)
    with pytest.raises(UnknownVllmError, match="as expected"):
        patch_detokenizer(lambda _name: types.SimpleNamespace())
    assert made.__init__ is __init__

"""The simulated model's tokenizer: a real one, so that one text has many tokenizations."""

import json
import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from tokencache.testing import build_tokenizer

TEXTS = [
    "",
    "plain words, then some more.",
    "naïve café ☕ 日本語 \U0001f680",
    "  spaces\t\n\n and\r\nline ends  \n",
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la"}}\n</tool_call>',
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "x" * 500,
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_decode_to_the_text_they_were_made_from(text):
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text


def test_added_tokens_are_single_ids_and_only_special_ones_disappear():
    tokenizer = build_tokenizer()
    ids = tokenizer.encode("a<|im_end|>b<think>c")
    assert tokenizer.stop_id in ids
    assert tokenizer.id_of("<think>") in ids
    assert tokenizer.decode(ids, skip_special=True) == "ab<think>c"


@pytest.mark.parametrize("text", [text for text in TEXTS if " " in text])
def test_a_resampled_text_is_the_same_text_in_other_ids(text):
    tokenizer = build_tokenizer()
    drifted = tokenizer.resample(text, random.Random(3), rate=0.3)
    assert tokenizer.decode(drifted) == text
    assert drifted != tokenizer.encode(text)
    assert drifted == tokenizer.resample(text, random.Random(3), rate=0.3)
    assert tokenizer.resample(text, random.Random(3), rate=0) == tokenizer.encode(text)


def test_the_smallest_rate_still_drifts():
    tokenizer = build_tokenizer()
    for seed in range(50):
        assert tokenizer.resample("Two words.", random.Random(seed), rate=1e-9) != tokenizer.encode("Two words.")


def test_added_tokens_are_never_split():
    tokenizer = build_tokenizer()
    text = "<think>\nwhy\n</think>\n\n<tool_call>\n{}\n</tool_call><|im_end|>"
    drifted = tokenizer.resample(text, random.Random(0), rate=1.0)
    for token in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"):
        assert tokenizer.id_of(token) in drifted


def test_another_process_trains_the_same_tokenizer():
    code = (
        "from tokencache.testing import build_tokenizer as b; t = b(); print(t.encode('The user wants tea, naïve ☕.'), t.vocabulary_size)"
    )
    there = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    tokenizer = build_tokenizer()
    assert there.strip() == f"{tokenizer.encode('The user wants tea, naïve ☕.')} {tokenizer.vocabulary_size}"


def test_the_saved_folder_has_the_same_tokenizer_and_template(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save(tmp_path / "model")
    saved = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert saved.encode("Hello <think> there", add_special_tokens=False).ids == tokenizer.encode("Hello <think> there")
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"  # noqa: S105
    assert config["chat_template"] == tokenizer.chat_template

"""A tiny Qwen3-VL with random weights and its own tokenizer: nothing is downloaded."""

import json
from pathlib import Path

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tokencache.testing import build_tokenizer

PATCH, MERGE = 16, 2
"""Pixels of a patch's side; patches of a token's side. So 32 by 32 pixels are a token."""
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
    {%- for part in message.content -%}
        {%- if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif -%}
    {%- endfor -%}
{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
""".strip()


def make_vision_model(folder: Path) -> None:
    """Writes a model folder that vLLM can serve and transformers can load."""
    tokenizer = build_tokenizer()
    tokenizer.save(folder)
    ids = _add_tokens(folder)
    stop, pad = tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")
    size = {"shortest_edge": (2 * MERGE * PATCH) ** 2, "longest_edge": (8 * MERGE * PATCH) ** 2}
    common = {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": size,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    files = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast", **common},
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
            **common,
        },
        "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    Qwen3VLForConditionalGeneration(_config(len(ids), ids, stop, pad)).save_pretrained(folder)


def _add_tokens(folder: Path) -> dict[str, int]:
    """Adds the tokens of images and the template; returns the id of each token."""
    path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    ids: dict[str, int] = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    for token in TOKENS:
        if token not in ids:
            ids[token] = max(ids.values()) + 1
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            tokenizer["added_tokens"].append({"id": ids[token], "content": token, **flags, "special": True})
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings.write_text(json.dumps(json.loads(settings.read_text(encoding="utf-8")) | {"chat_template": TEMPLATE}), encoding="utf-8")
    return ids


def _config(vocabulary: int, ids: dict[str, int], stop: int, pad: int) -> Qwen3VLConfig:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000,
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "bos_token_id": pad,
        "eos_token_id": stop,
        "pad_token_id": pad,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.15,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        bos_token_id=pad,
        eos_token_id=stop,
    )

"""Tiny models for images around the project's own tokenizer, and a real vLLM that serves one, a Qwen3-VL, with the plugin.

`vision_families` has the other models. Weights are made by vLLM (`--load-format dummy`), which makes them so small that all log
probabilities are alike, whatever the images are. So a plugin of this rig (`large_weights`) makes them larger.
"""

import json
import struct
import zlib
from importlib.metadata import distribution
from pathlib import Path

from rig.model import PAD, STOP
from rig.server import HERE, REPOSITORY, VllmServer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PATCH = 32
"""Pixels of a token's side: patches of 16, merged by two."""
IMAGES_AT_MOST = 8

_PARTS = r"""
{%- macro parts(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is not none -%}
        {%- for part in content -%}
            {%- if part.type == 'text' -%}{{ part.text }}{%- else -%}IMAGE{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{#- vLLM looks for such a loop to find out that the template takes parts -#}
{%- for message in messages %}{%- if message.content is not string and message.content is not none %}
    {%- for part in message.content %}{%- endfor %}{%- endif %}{%- endfor %}
""".strip()


def vision_template(template, image):
    """A chat template that writes `image` for each image, made from one for text."""
    text = "{%- set text = message.content if message.content is string else '' %}"
    query = "message.role == 'user' and message.content is string\n"
    preamble = "{%- set preamble = messages[0].content %}"
    said = "message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')"
    for written, instead in (
        (text, "{%- set text = parts(message.content) %}"),
        (query, "message.role == 'user'\n"),
        (preamble, "{%- set preamble = parts(messages[0].content) %}"),
        (said, said.replace("message.content", "parts(message.content)")),
    ):
        assert template.count(written) == 1, written
        template = template.replace(written, instead)
    return _PARTS.replace("IMAGE", image) + "\n" + template


def make_vision_model(tokenizer_dir, out):
    """Writes the folder of a Qwen3-VL around the tokenizer in `tokenizer_dir`; returns its path."""
    return write_vision_model(tokenizer_dir, out, VISION_TOKENS, IMAGE, qwen3_vl)


def write_vision_model(tokenizer_dir, out, tokens, image, make_files, *, plain_tokens=(), named=None):
    """Writes a model folder around the tokenizer in `tokenizer_dir`; returns its path.

    `tokens` and `plain_tokens` are added to the vocabulary, the first as special ones; `named` goes into the tokenizer's configuration.
    The chat template writes `image` for an image. `make_files` gets the ids of all tokens and returns the other JSON files by name.
    """
    source, out = Path(tokenizer_dir), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    for token in (*tokens, *plain_tokens):
        if token not in ids:
            ids[token] = max(ids.values()) + 1
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            tokenizer["added_tokens"].append({"id": ids[token], "content": token, **flags, "special": token in tokens})
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    configured = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8")) | (named or {})
    configured["chat_template"] = vision_template(configured["chat_template"], image)
    for name, content in (make_files(ids) | {"tokenizer_config.json": configured}).items():
        (out / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return out


def qwen3_vl(ids):
    """The files of a Qwen3-VL."""
    size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (8 * PATCH) ** 2}
    common = {"processor_class": "Qwen3VLProcessor", "patch_size": PATCH // 2, "temporal_patch_size": 2, "merge_size": 2}
    common |= {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return {
        "config.json": _config(ids),
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast", **common},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor", **common},
        "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
    }


def _config(ids):
    text = {
        "model_type": "qwen3_vl_text",
        "vocab_size": max(ids.values()) + 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": ids[PAD],
        "eos_token_id": ids[STOP],
    }
    vision = {
        "model_type": "qwen3_vl",
        "depth": 2,
        "hidden_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "in_channels": 3,
        "patch_size": PATCH // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "bos_token_id": ids[PAD],
        "eos_token_id": ids[STOP],
    }


class VisionServer(VllmServer):
    """A real vLLM with images, with the plugin or without it. It has derender, `generate`, and the routes of development mode."""

    description = "vLLM 0.32 with a tiny model for images"

    def __init__(self, model_dir, episodes, *, plugin=True, max_model_len=16384, images=IMAGES_AT_MOST, **more):
        super().__init__(model_dir, episodes, max_model_len=max_model_len, **more)
        self.plugin = plugin
        self.starts = "spawn" if plugin else "fork"  # each process loads the plugin, as in a deployment
        limits = json.dumps({"image": images, "video": 0})  # without it vLLM tries the longest videos when it starts
        self.options += ["--load-format", "dummy", "--skip-mm-profiling", "--limit-mm-per-prompt", limits, "--enable-scale-out"]

    def environment(self):
        """The environment of `VllmServer`, with torchvision, and the plugin as if it were installed there."""
        folder = self.workdir / "plugins"
        installed = folder / "tokencache_vllm-0.dist-info"
        installed.mkdir(parents=True, exist_ok=True)
        groups = {"vllm.general_plugins": ["large_weights = large_weights:register"]}
        for point in distribution("tokencache-vllm").entry_points:
            groups.setdefault(point.group, []).append(f"{point.name} = {point.value}")
        lines = [line for group, points in groups.items() for line in (f"[{group}]", *points)]
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: tokencache-vllm\nVersion: 0\n")
        (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
        path = [folder, HERE, REPOSITORY / "vllm_plugin", self.venv / "torchvision"]
        return super().environment() | {
            "PYTHONPATH": ":".join(map(str, path)),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PLUGINS": "large_weights,tokencache" if self.plugin else "large_weights",
        }


def png(width, height, seed=0):
    """A PNG of this size; each seed gives another picture."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(
        b"\0" + bytes((x * 7 + y * 3 + seed * (41 + c * 17)) % 256 for x in range(width) for c in range(3)) for y in range(height)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")

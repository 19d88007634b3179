"""Tiny models of six families for images, each with another way to write placeholders. `vision` makes their folders.

LLaVA, Qwen2-VL, Qwen2.5-VL and Qwen3-VL have runs of one id; LLaVA-NeXT has runs that depend on the shape; Gemma 3 has more ids than
embeddings, and newlines that its own replacement merges with those around an image.
"""

from rig.model import PAD, STOP
from rig.vision import IMAGE, VISION_TOKENS, qwen3_vl, write_vision_model

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}
_SQUARES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
"""A vision tower for images of 56 by 56 pixels: 16 embeddings."""
_HALF = [0.5] * 3
_GEMMA_TOKENS = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
_NEWLINES = tuple("\n" * n for n in (1, 2, 3, 4))
"""Gemma's vocabulary has them as tokens by these names; vLLM looks for them."""


def _model(ids, architecture, kind, text, vision, **members):
    text = _TEXT | {"vocab_size": max(ids.values()) + 1, "bos_token_id": ids[PAD], "eos_token_id": ids[STOP]} | text
    common = {"torch_dtype": "float32", "tie_word_embeddings": True, "bos_token_id": ids[PAD], "eos_token_id": ids[STOP]}
    config = {"architectures": [architecture], "model_type": kind, "text_config": text, "vision_config": vision}
    return config | common | members


def _llava(ids, *, shapes=()):
    name, kind = ("LlavaNext", "llava_next") if shapes else ("Llava", "llava")
    pins = {"image_grid_pinpoints": [list(shape) for shape in shapes]} if shapes else {}
    tower = _SQUARES | {"model_type": "clip_vision_model", "projection_dim": 64, "hidden_act": "quick_gelu"}
    text = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    chosen = {"vision_feature_select_strategy": "default"}
    more = pins | chosen | {"vision_feature_layer": -2, "projector_hidden_act": "gelu", "image_seq_length": 16}
    image_id = ids["<image>"]
    image = {"image_processor_type": "LlavaNextImageProcessor" if shapes else "CLIPImageProcessor", "do_resize": True}
    image |= pins | {"size": {"shortest_edge": 56}, "do_center_crop": True, "crop_size": {"height": 56, "width": 56}, "do_rescale": True}
    image |= {"rescale_factor": 1 / 255, "do_normalize": True, "image_mean": _HALF, "image_std": _HALF, "do_convert_rgb": True}
    processor = {"processor_class": f"{name}Processor"}
    return {
        "config.json": _model(
            ids, f"{name}ForConditionalGeneration", kind, text, tower, image_token_index=image_id, image_token_id=image_id, **more
        ),
        "preprocessor_config.json": image | processor,
        "processor_config.json": processor | chosen | {"patch_size": 14, "image_token": "<image>", "num_additional_image_tokens": 1},
    }


def _llava_next(ids):
    return _llava(ids, shapes=((56, 112), (112, 56), (112, 112), (168, 56), (56, 168)))


def _qwen2(ids, name, kind, vision):
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]}
    tower = {"model_type": kind, "depth": 2, "num_heads": 2, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2}
    tower |= {"temporal_patch_size": 2} | vision
    text = {"model_type": f"{kind}_text", "rope_scaling": rope, "hidden_size": 128}
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    processor = {"processor_class": f"{name}Processor"}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 224 * 224, "patch_size": 14}
    image |= {"temporal_patch_size": 2, "merge_size": 2, "image_mean": _HALF, "image_std": _HALF}
    more = {member: ids[token] for member, token in names.items()}
    return {
        "config.json": _model(ids, f"{name}ForConditionalGeneration", kind, text, tower, **more),
        "preprocessor_config.json": image | processor,
        "processor_config.json": processor,
    }


def _qwen2_vl(ids):
    vision = {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2, "in_chans": 3, "spatial_patch_size": 14, "hidden_act": "quick_gelu"}
    return _qwen2(ids, "Qwen2VL", "qwen2_vl", vision)


def _qwen2_5_vl(ids):
    vision = {"hidden_size": 64, "out_hidden_size": 128, "intermediate_size": 128, "hidden_act": "silu", "fullatt_block_indexes": [1]}
    vision |= {"window_size": 112, "tokens_per_second": 2}
    return _qwen2(ids, "Qwen2_5_VL", "qwen2_5_vl", vision)


def _gemma3(ids):
    text = {"model_type": "gemma3_text", "sliding_window": 4096, "query_pre_attn_scalar": 32, "sliding_window_pattern": 2}
    text |= {"rope_local_base_freq": 10000}
    tower = _SQUARES | {"model_type": "siglip_vision_model", "vision_use_head": False}
    index = {
        "boi_token_index": "boi_token",
        "eoi_token_index": "eoi_token",
        "image_token_index": "image_token",
        "image_token_id": "image_token",
    }
    more = {member: ids[_GEMMA_TOKENS[token]] for member, token in index.items()}
    image = {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor", "do_resize": True}
    image |= {"size": {"height": 56, "width": 56}, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    image |= {"image_mean": _HALF, "image_std": _HALF, "image_seq_length": 4}
    pan = ("do_pan_and_scan", "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate")
    return {
        "config.json": _model(ids, "Gemma3ForConditionalGeneration", "gemma3", text, tower, mm_tokens_per_image=4, **more),
        "preprocessor_config.json": image | dict.fromkeys(pan),
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    }


FAMILIES = {
    "llava": (("<image>",), "<image>", _llava),
    "llava_next": (("<image>",), "<image>", _llava_next),
    "qwen2_vl": (VISION_TOKENS, IMAGE, _qwen2_vl),
    "qwen2_5_vl": (VISION_TOKENS, IMAGE, _qwen2_5_vl),
    "qwen3_vl": (VISION_TOKENS, IMAGE, qwen3_vl),
    "gemma3": (tuple(_GEMMA_TOKENS.values()), "<start_of_image>", _gemma3),
}
"""Family → tokens of its vocabulary, what its template writes for an image, and its other files."""


def make_family(family, tokenizer_dir, out):
    """Writes a model folder of a family around the tokenizer in `tokenizer_dir`; returns its path."""
    tokens, image, files = FAMILIES[family]
    if family != "gemma3":
        return write_vision_model(tokenizer_dir, out, tokens, image, files)
    named = {**_GEMMA_TOKENS, "extra_special_tokens": _GEMMA_TOKENS}
    return write_vision_model(tokenizer_dir, out, tokens, image, files, plain_tokens=_NEWLINES, named=named)

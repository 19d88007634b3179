"""Writes a tiny Qwen3 with random weights, using only the standard library.

usage: python model.py TOKENIZER_DIR OUT_DIR

Two layers, hidden size 64. vLLM's CPU attention needs heads of at least 32, so there are four of those. Weights are large enough that a
token's log probability distinguishes it from others: with the near-zero weights of vLLM's `--load-format dummy` all are equal to six
digits, and no test could detect one assigned to the wrong token. The output matrix is separate: tied to the input's, such a model would
repeat one token forever.

`$TOKENCACHE_E2E_SHAPE` replaces members of `SHAPE`, as JSON: a larger model, for a GPU.
"""

import array
import json
import os
import random
import shutil
import struct
import sys
from pathlib import Path

SHAPE = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "inner": 128}
SHAPE |= json.loads(os.environ.get("TOKENCACHE_E2E_SHAPE", "{}"))
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = SHAPE.values()
CONTEXT = 131072
RANK = 8
STOP = "<|im_end|>"
PAD = "<|endoftext|>"
NOISE = 65537
"""Length of the noise that is repeated to fill a matrix: a prime, so that no two rows are equal."""


def make_model(tokenizer_dir, out, *, change=0.0):
    """Writes a model folder that vLLM can serve, around the tokenizer found in `tokenizer_dir`; returns its path.

    With a `change`, its layers differ from those without by noise of this size, relative to the weights.
    """
    source, out = Path(tokenizer_dir), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if source.resolve() != out.resolve():
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            if (source / name).exists():
                shutil.copy(source / name, out / name)
    tokenizer = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = max(ids.values()) + 1
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": ids[PAD],
        "eos_token_id": ids[STOP],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_safetensors(out / "model.safetensors", shapes(vocabulary), change=change)
    return out


def make_adapter(out, *, seed):
    """Writes a LoRA adapter of the model to a folder, over an earlier one if there is one; returns its path."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    names = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    tensors = []
    for layer in range(LAYERS):
        for name, rows in names.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            tensors += [(f"{at}.lora_A.weight", (RANK, HIDDEN), 0.1), (f"{at}.lora_B.weight", (rows, RANK), 0.3)]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [f"{name}_proj" for name in names], "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "tiny"}), encoding="utf-8")
    write_safetensors(out / "adapter_model.safetensors", tensors, seed=seed)
    return out


def shapes(vocabulary):
    """Name, shape and standard deviation of each weight; a deviation of None means ones."""
    yield "model.embed_tokens.weight", (vocabulary, HIDDEN), 0.5
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows * HEAD_DIM, HIDDEN), 0.1
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM), 0.1
        yield f"{at}.self_attn.q_norm.weight", (HEAD_DIM,), None
        yield f"{at}.self_attn.k_norm.weight", (HEAD_DIM,), None
        yield f"{at}.mlp.gate_proj.weight", (INNER, HIDDEN), 0.1
        yield f"{at}.mlp.up_proj.weight", (INNER, HIDDEN), 0.1
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, INNER), 0.1
        yield f"{at}.input_layernorm.weight", (HIDDEN,), None
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,), None
    yield "model.norm.weight", (HIDDEN,), None
    yield "lm_head.weight", (vocabulary, HIDDEN), 0.15


def write_safetensors(path, tensors, seed=0, *, change=0.0):
    """The whole format: header length, header, data. `change`: see `make_model`."""
    rng = random.Random(seed)
    noise = array.array("f", (rng.gauss(0, 1) for _ in range(NOISE)))
    header, chunks, at = {}, [], 0
    for name, shape, deviation in tensors:
        count = 1
        for size in shape:
            count *= size
        if deviation is None:
            values = array.array("f", [1.0]) * count
        else:
            start = rng.randrange(NOISE)
            other = noise[1:] + noise[:1] if change and ".layers." in name else array.array("f", [0.0]) * NOISE
            turned = zip(noise[start:] + noise[:start], other, strict=True)
            stretch = array.array("f", (deviation * (x + change * y) for x, y in turned))
            values = (stretch * (count // NOISE + 1))[:count]
        data = values.tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + len(data)]}
        chunks.append(data)
        at += len(data)
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    head += b" " * (-len(head) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.writelines(chunks)


if __name__ == "__main__":
    print(make_model(sys.argv[1], sys.argv[2]))

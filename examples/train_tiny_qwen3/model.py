"""A tiny Qwen3 with random weights and its own tokenizer: nothing is downloaded."""

from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM

from tokencache.testing import build_tokenizer


def make_model(folder: Path) -> None:
    """Writes a model folder that vLLM can serve and transformers can load.

    The weights are larger than usual at the start of a training, so that the tokens' probabilities are distinct. vLLM's CPU attention needs
    heads of at least 32; the output matrix differs from the input's, otherwise such a model repeats itself.
    """
    tokenizer = build_tokenizer()  # byte-level BPE with a template like Qwen3's
    tokenizer.save(folder)
    stop, pad = tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")
    config = Qwen3Config(
        vocab_size=tokenizer.vocabulary_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=pad,
        eos_token_id=stop,
        pad_token_id=pad,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)

"""More kinds of templates for the matrix: stand-ins for public models. `template_lab.KINDS` has those that the documentation lists."""

# ruff: noqa: RUF001 - DeepSeek's tokens are spelled with full-width bars

import pytest

from tests.engine.template.template_lab import CHATML, KINDS, MARKUP, Kind

_LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>")
_LLAMA4 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot|>", "<|eom|>", "<|header_start|>", "<|header_end|>")
_NANO = ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
_KIMI = (
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "[EOS]", "<think>", "</think>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_MINIMAX = ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>")
_MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
_COMMAND = (
    *("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
)
_GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
_PHI = (
    *("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
    *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
)
_HUNYUAN = ("<|startoftext|>", "<|eos|>", "<|extra_0|>", "<|extra_4|>", "<think>", "</think>")
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
_EXAONE = ("[|system|]", "[|user|]", "[|assistant|]", "[|tool|]", "[|endofturn|]", "<think>", "</think>", "<tool_call>", "</tool_call>")
_SEED = ("<seed:bos>", "<seed:eos>", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>")
_HERMES = ("<|im_end|>", "<|endoftext|>")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")


def _kind(name: str, file: str, tokens: tuple[str, ...], stops: tuple[str, ...], style: str, *, bos: str = "", parts: bool = False) -> Kind:
    """A kind without a real template in the shared folder, whose replies end with the first of its stop tokens."""
    return Kind(name, file, "", tokens, stops, stops[:1], style, parts=parts, bos=bos)


MORE_KINDS = {
    kind.name: kind
    for kind in (
        _kind("Nemotron Super 1.5", "nemotron_super_1_5", _LLAMA, ("<|eot_id|>", "<|end_of_text|>"), "toolcall", bos="<|begin_of_text|>"),
        _kind("Nemotron Nano v2", "nemotron_nano_v2", _NANO, ("<SPECIAL_12>",), "toolcall"),
        _kind("SmolLM3", "smollm3", CHATML + MARKUP, _HERMES, "hermes"),
        _kind("Kimi-K2", "kimi_k2", _KIMI, ("<|im_end|>", "[EOS]"), "kimi"),
        _kind("Kimi-K2-Thinking", "kimi_k2_thinking", _KIMI, ("<|im_end|>", "[EOS]"), "kimi"),
        _kind("MiniMax-M2", "minimax_m2", _MINIMAX, ("[e~[",), "minimax"),
        _kind("Mistral-7B v0.3", "mistral_v3", _MISTRAL, ("</s>",), "mistral", bos="<s>"),
        _kind("Mistral Small 3.1", "mistral_small", _MISTRAL, ("</s>",), "mistral", bos="<s>", parts=True),
        _kind("Llama 4", "llama4", _LLAMA4, ("<|eot|>", "<|eom|>", "<|end_of_text|>"), "pythonic", bos="<|begin_of_text|>", parts=True),
        _kind("Gemma 3", "gemma3", _GEMMA, ("<end_of_turn>", "<eos>"), "pythonic", bos="<bos>", parts=True),
        _kind("Command R7B", "command_r7b", _COMMAND, ("<|END_OF_TURN_TOKEN|>",), "command", bos="<BOS_TOKEN>"),
        _kind("Granite 3.3", "granite_3_3", _GRANITE, ("<|end_of_text|>",), "granite"),
        _kind("Phi-4-mini", "phi4_mini", _PHI, ("<|end|>", "<|endoftext|>"), "phi"),
        _kind("Hunyuan-A13B", "hunyuan_a13b", _HUNYUAN, ("<|eos|>",), "hunyuan"),
        _kind("DeepSeek-V3.1", "deepseek_v3_1", _DEEPSEEK, ("<｜end▁of▁sentence｜>",), "deepseek-3.1", bos="<｜begin▁of▁sentence｜>"),
        _kind("Qwen3-Coder", "qwen3_coder", CHATML + MARKUP, _HERMES, "xml"),
        _kind("OLMo 3", "olmo3", (*CHATML, "<functions>", "</functions>"), _HERMES, "olmo", bos="<|endoftext|>"),
        _kind("EXAONE 4.0", "exaone4", _EXAONE, ("[|endofturn|]",), "hermes"),
        _kind("Seed-OSS", "seed_oss", _SEED, ("<seed:eos>",), "seed"),
    )
}
ALL_KINDS = KINDS | MORE_KINDS
EACH_KIND = [*KINDS, *(pytest.param(name, marks=pytest.mark.whole) for name in MORE_KINDS)]
"""Parameters: the name of each kind; those without a real template in the whole run only."""

"""The policy: a Qwen3 of two layers that has seen a few hundred demonstrations, most of them wrong."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from examples.grpo_mini_swe_agent.task import ANSWER, Task, draw
from tokencache.testing import build_tokenizer

PHASES = ((60, 3e-3), (20, 5e-4))
"""The warm-up: steps and learning rate."""

FILES = (ANSWER, "result.txt", "output.txt", "word.txt", "copy.txt")
"""Files to which demonstrations write the word: only one of five solves the task."""

BATCH, EMPHASIS = 8, 20.0
"""Demonstrations in a step, and how much more the note and the word count than the other tokens of a reply, of which there are many."""

STOP = "<|im_end|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""The tool of mini-swe-agent (`minisweagent/models/utils/actions_toolcall.py`)."""


def make_policy(folder: Path) -> Qwen3ForCausalLM:
    """Write a model folder that vLLM can serve, with weights that were trained on demonstrations. Returns the model."""
    build_tokenizer().save(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,  # vLLM's CPU attention needs at least 32
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(STOP),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    policy = Qwen3ForCausalLM(config)
    warm_up(policy, tokenizer)
    policy.save_pretrained(folder)
    return policy


def warm_up(policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Train on demonstrations: the model learns to read the right note and to repeat its word, but not which file to write."""
    chance = random.Random(0)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95))
    for steps, learning_rate in PHASES:
        for _ in range(steps):
            rows = [demonstration(tokenizer, draw(chance), chance) for _ in range(BATCH)]
            ids, weights = (torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in zip(*rows, strict=True))
            counts = weights[:, 1:][weights[:, 1:] > 0]
            loss = -(logprobs(policy, ids, weights > 0) * counts).sum() / counts.sum()
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()


def demonstration(tokenizer: PreTrainedTokenizerBase, task: Task, chance: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids of a rollout, and the weight of each: 0 outside the replies."""
    note, word, file = task.wanted, task.words[task.wanted], chance.choice(FILES)
    chosen = {tokenizer(f" {name}").input_ids[0] for name in (note, word)}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You solve tasks with bash."},
        {"role": "user", "content": task.prompt},
    ]
    ids: list[int] = []
    weights: list[float] = []
    commands = (f"cat {note}.txt", f"echo {word} > {file}", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    for command, output in zip(commands, (f"{word}\n", "", ""), strict=True):
        prompt = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, return_dict=False)
        call = {"name": "bash", "arguments": {"command": command}}
        reply = tokenizer(f"<tool_call>\n{json.dumps(call)}\n</tool_call>{STOP}").input_ids
        weights += [0.0] * (len(prompt) - len(ids)) + [EMPHASIS if token in chosen else 1.0 for token in reply]
        ids = [*prompt, *reply]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": f"<returncode>0</returncode>\n<output>\n{output}</output>"},
        ]
    return torch.tensor(ids), torch.tensor(weights)


def logprobs(policy: Qwen3ForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the log probability of each token with mask 1, row after row: float32."""
    # Padding is on the right, and attention is causal: no attention mask is needed.
    hidden = policy.model(ids).last_hidden_state[:, :-1][mask[:, 1:].bool()]
    targets = ids[:, 1:][mask[:, 1:].bool()]
    return torch.log_softmax(policy.lm_head(hidden).float(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)

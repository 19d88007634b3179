"""Trains a tiny Qwen3 on rollouts through the proxy, and shows why the exact tokens matter.

A real vLLM on CPU serves a model with random weights, and a simple harness has conversations of several turns with it through tokencache.
The exported sequences are given to the same model in plain torch: before the first step it must compute the log probabilities that were
recorded. Then the same histories are rendered and tokenized from their text, as a trainer without the tokens has to: the results differ.
Finally a few steps of policy gradient follow. See README.md in this folder.
"""

import argparse
import asyncio
import difflib
import json
import statistics
import tempfile
from pathlib import Path

import openai
import torch
from engine import MODEL, vllm_server
from model import make_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from tokencache.client import AsyncClient, AsyncSession, Sequence, Trajectory
from tokencache.config import Settings
from tokencache.server.serve import serving

GROUPS, ROLLOUTS, TURNS, MAX_TOKENS = 3, 4, 3, 48
STEPS, LEARNING_RATE, CLIP = 5, 5e-4, 0.2
STOP = "<|im_end|>"
SAME = 1e-3
"""Log probabilities within this distance count as equal: two engines add up their float32 in different order."""

Message = dict[str, str]


async def talk(session: AsyncSession, group: int) -> list[Message]:
    """One rollout with a harness that uses only text. Returns its own history."""
    messages = [{"role": "user", "content": f"Tell me something, number {group}."}]
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        for turn in range(TURNS):
            reply = await model.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=MAX_TOKENS)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
            if turn < TURNS - 1:
                messages.append({"role": "user", "content": "Go on."})
    return messages


async def rollouts(engine: str) -> tuple[list[Trajectory], dict[str, list[Message]]]:
    """Runs all rollouts through a proxy in front of the engine; returns what it recorded, and the harnesses' own histories."""
    async with serving(Settings(upstream=engine, port=0)) as (url, _), AsyncClient(url) as client:
        names = [f"g{group}-{n}" for group in range(GROUPS) for n in range(ROLLOUTS)]
        # The policy is sampled unmodified: temperature 1 and no cuts, whatever the harness requests.
        sessions = [await client.create(name, sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0}) for name in names]
        histories = await asyncio.gather(*(talk(session, i // ROLLOUTS) for i, session in enumerate(sessions)))
        for session in sessions:
            await session.finish()
        trajectories = [trajectory async for trajectory in client.iterate(names, seal=True, delete=True)]
    return sorted(trajectories, key=lambda one: one.session), dict(zip(names, histories, strict=True))


def logprobs(policy: Qwen3ForCausalLM, ids: list[int]) -> torch.Tensor:
    """Log probability of each token but the first, given those before it: float32, one less than there are ids."""
    logits = policy(torch.tensor([ids])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)


def sequences_of(trajectories: list[Trajectory]) -> list[Sequence]:
    """All sequences; here each rollout is one."""
    return [sequence for trajectory in trajectories for sequence in trajectory.sequences]


def sampled(sequence: Sequence) -> torch.Tensor:
    """Which of the tokens but the first the policy sampled."""
    return torch.tensor(sequence.loss_mask[1:], dtype=torch.bool)


def recorded(sequence: Sequence) -> torch.Tensor:
    """The log probabilities with which those were sampled."""
    return torch.tensor(sequence.logprobs[1:])[sampled(sequence)]


def compared(tokens: int, apart: list[float]) -> dict[str, float]:
    """Counts sampled tokens, those found again, and those of them with another log probability, and gives the largest difference."""
    return {"tokens": tokens, "found": len(apart), "differ": sum(one > SAME for one in apart), "max_difference": max(apart)}


@torch.no_grad()
def exact(policy: Qwen3ForCausalLM, trajectories: list[Trajectory]) -> dict[str, float]:
    """Compares the recorded log probabilities with the policy's own, on the tokens of the proxy."""
    apart = []
    for sequence in sequences_of(trajectories):
        apart += (logprobs(policy, sequence.token_ids)[sampled(sequence)] - recorded(sequence)).abs().tolist()
    return compared(sum(one.trainable_tokens for one in sequences_of(trajectories)), apart)


@torch.no_grad()
def retokenized(
    policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, trajectories: list[Trajectory], histories: dict[str, list[Message]]
) -> dict[str, float]:
    """The same on tokens made from text: each reply after a rendering of its history, compared token by token where they are equal."""
    tokens, apart = 0, []
    for trajectory in trajectories:
        messages = histories[trajectory.session]
        (sequence,) = trajectory.sequences
        for turn, span in enumerate(sequence.turns):
            start, end = span.completion
            tokens += end - start
            prompt = tokenizer.apply_chat_template(messages[: 2 * turn + 1], add_generation_prompt=True, return_dict=False)
            reply = tokenizer(messages[2 * turn + 1]["content"] + STOP, add_special_tokens=False).input_ids
            found = logprobs(policy, prompt + reply)[len(prompt) - 1 :]
            matcher = difflib.SequenceMatcher(None, sequence.token_ids[start:end], reply, autojunk=False)
            for here, there, length in matcher.get_matching_blocks():
                apart += [abs(float(found[there + i]) - sequence.logprobs[start + here + i]) for i in range(length)]
    return compared(tokens, apart)


def advantages(trajectories: list[Trajectory], histories: dict[str, list[Message]]) -> dict[str, float]:
    """Rewards each rollout for the share of plain letters in its replies; returns its advantage over its group."""
    texts = {one.session: "".join(m["content"] for m in histories[one.session] if m["role"] == "assistant") for one in trajectories}
    rewards = {name: sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for name, text in texts.items()}
    found = {}
    for group in range(GROUPS):
        members = [name for name in rewards if name.startswith(f"g{group}-")]
        mean, spread = statistics.fmean(rewards[m] for m in members), statistics.pstdev(rewards[m] for m in members) or 1.0
        found |= {name: (rewards[name] - mean) / spread for name in members}
    return found


def train(policy: Qwen3ForCausalLM, trajectories: list[Trajectory], advantage: dict[str, float]) -> list[dict[str, float]]:
    """Takes a few steps on the clipped surrogate of PPO and GRPO; each sequence counts with its weight."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    before = torch.cat([p.detach().flatten().clone() for p in policy.parameters()])
    steps = []
    for _ in range(STEPS):
        losses, ratios = [], []
        for trajectory in trajectories:
            a = advantage[trajectory.session]
            for sequence in trajectory.sequences:
                ratio = (logprobs(policy, sequence.token_ids)[sampled(sequence)] - recorded(sequence)).exp()
                losses.append(-sequence.weight * torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean())
                ratios.append(ratio.detach())
        loss = torch.stack(losses).sum() / len(trajectories)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moved = torch.cat([p.detach().flatten() for p in policy.parameters()]) - before
        steps.append({"loss": loss.item(), "ratio": torch.cat(ratios).mean().item(), "moved": moved.norm().item()})
    return steps


def main() -> None:
    """Runs everything and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="tiny-qwen3-") as folder:
        make_model(Path(folder))
        with vllm_server(Path(folder)) as engine:
            trajectories, histories = asyncio.run(rollouts(engine))
        policy = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    figures = {
        "rollouts": len(trajectories),
        "sequences": len(sequences_of(trajectories)),
        "complete": all(one.complete for one in trajectories),
    }
    print(f"{figures['rollouts']} rollouts of {TURNS} turns in {figures['sequences']} sequences, complete: {figures['complete']}\n")

    figures["exact"] = exact(policy, trajectories)
    figures["retokenized"] = retokenized(policy, tokenizer, trajectories, histories)
    print("before the first step    sampled   found again   other logprob   max |difference|")
    for words, one in (("the proxy's tokens", figures["exact"]), ("tokens made from text", figures["retokenized"])):
        print(f"{words:22} {one['tokens']:9} {one['found']:13} {one['differ']:15} {one['max_difference']:18.1e}")

    figures["steps"] = train(policy, trajectories, advantages(trajectories, histories))
    print("\nstep      loss   mean ratio   weights moved by")
    for n, step in enumerate(figures["steps"]):
        print(f"{n:4}  {round(step['loss'], 5) + 0.0:+.5f}   {step['ratio']:10.6f}   {step['moved']:16.4f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Trains a tiny Qwen3-VL on rollouts with images: expanded ids and images in order are all that a trainer needs.

A stock vLLM on CPU serves a model with random weights, and a simple harness shows it pictures through tokencache. The exported sequences
and their images are given to the same model in plain torch, with the model's own image processor: before the first step it must compute
the log probabilities that were recorded. With other pictures of the same size it does not. Then a few steps of policy gradient follow.
"""

import argparse
import asyncio
import base64
import io
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import openai
import torch
from engine import MODEL, vllm_server
from PIL import Image
from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration
from transformers.utils.logging import disable_progress_bar
from vision_model import make_vision_model

from tokencache.batching import image_inputs, load_images
from tokencache.client import AsyncClient, AsyncSession, Sequence, Trajectory
from tokencache.config import Settings
from tokencache.core.media import file_name
from tokencache.server.serve import serving

ROLLOUTS, TURNS, MAX_TOKENS = 4, 3, 32
STEPS, LEARNING_RATE, CLIP = 3, 5e-4, 0.2
SIZES = ((64, 64), (128, 96), (96, 160))
"""Width and height of the pictures of each turn, in pixels."""


def picture(rollout: int, turn: int) -> str:
    """A data URI of a picture."""
    width, height = SIZES[turn]
    made = Image.effect_mandelbrot((width, height), (-2.0 + rollout / 10, -1.5, 1.0, 1.5), 20 + turn).convert("RGB")
    file = io.BytesIO()
    made.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def talk(session: AsyncSession, rollout: int) -> None:
    """One rollout: a picture in each turn."""
    messages: list[Any] = []
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as model:
        for turn in range(TURNS):
            shown = {"type": "image_url", "image_url": {"url": picture(rollout, turn)}}
            messages.append({"role": "user", "content": [{"type": "text", "text": "What is this?"}, shown]})
            reply = await model.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=MAX_TOKENS)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})


async def rollouts(engine: str, media: Path) -> list[Trajectory]:
    """Runs all rollouts through a proxy in front of the engine; returns what it recorded, and writes the images to a folder."""
    async with serving(Settings(upstream=engine, port=0)) as (url, _), AsyncClient(url) as client:
        names = [f"r{n}" for n in range(ROLLOUTS)]
        sessions = [await client.create(name, sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0}) for name in names]
        await asyncio.gather(*(talk(session, n) for n, session in enumerate(sessions)))
        for session in sessions:
            await session.finish()
            for medium in await session.media():
                (media / file_name(medium.sha256, medium.media_type)).write_bytes(await session.medium(medium.sha256))
        return [trajectory async for trajectory in client.iterate(names, seal=True, delete=True)]


class Row:
    """A sequence with the inputs of its images, as the model's code takes them."""

    def __init__(self, sequence: Sequence, images: list[Image.Image], processor: Any) -> None:
        self.ids = torch.tensor([sequence.token_ids])
        self.inputs = image_inputs(sequence, images, processor)
        inside = [at for medium in sequence.media for at in range(medium.start, medium.end)]
        self.kinds = torch.zeros_like(self.ids)
        self.kinds[0, inside] = 1
        self.sampled = torch.tensor(sequence.loss_mask[1:], dtype=torch.bool)
        self.recorded = torch.tensor(sequence.logprobs[1:])[self.sampled]

    def logprobs(self, policy: Qwen3VLForConditionalGeneration) -> torch.Tensor:
        """The policy's log probabilities of the sampled tokens."""
        logits = policy(input_ids=self.ids, mm_token_type_ids=self.kinds, **self.inputs).logits[0, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, self.ids[0, 1:].unsqueeze(-1)).squeeze(-1)[self.sampled]


@torch.no_grad()
def difference(policy: Qwen3VLForConditionalGeneration, rows: list[Row]) -> float:
    """The largest difference between recorded and recomputed log probabilities."""
    return max(float((row.logprobs(policy) - row.recorded).abs().max()) for row in rows)


def train(policy: Qwen3VLForConditionalGeneration, rows: list[Row]) -> list[dict[str, float]]:
    """Takes a few steps on the clipped surrogate of PPO and GRPO. The reward is the mean token id: random weights cannot do much else."""
    rewards = [float(row.ids[0, 1:][row.sampled].float().mean()) for row in rows]
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards) or 1.0
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    steps = []
    for _ in range(STEPS):
        losses, ratios = [], []
        for row, reward in zip(rows, rewards, strict=True):
            advantage = (reward - mean) / spread
            ratio = (row.logprobs(policy) - row.recorded).exp()
            losses.append(-torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean())
            ratios.append(ratio.detach())
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.append({"loss": loss.item(), "ratio": torch.cat(ratios).mean().item()})
    return steps


def main() -> None:
    """Runs everything and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="tiny-qwen3-vl-") as name:
        folder, media = Path(name), Path(name) / "media"
        media.mkdir()
        make_vision_model(folder)
        limits = json.dumps({"image": TURNS, "video": 0})
        with vllm_server(folder, "--enable-scale-out", "--skip-mm-profiling", "--limit-mm-per-prompt", limits) as engine:
            trajectories = asyncio.run(rollouts(engine, media))
        policy = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        processor = AutoImageProcessor.from_pretrained(folder)
        sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
        images = [load_images(sequence, media) for sequence in sequences]
    rows = [Row(sequence, own, processor) for sequence, own in zip(sequences, images, strict=True)]
    others = [Row(sequence, own, processor) for sequence, own in zip(sequences, [*images[1:], images[0]], strict=True)]
    figures = {
        "complete": all(one.complete for one in trajectories),
        "sequences": len(sequences),
        "images": sum(map(len, images)),
        "tokens": sum(one.trainable_tokens for one in sequences),
        "max_difference": difference(policy, rows),
        "other_images": difference(policy, others),
    }
    print(f"{len(trajectories)} rollouts of {TURNS} turns in {figures['sequences']} sequences, complete: {figures['complete']}")
    print(f"{figures['tokens']} sampled tokens, {figures['images']} images\n")
    print("max |difference| of log probabilities before the first step")
    print(f"with the images of the sequence          {figures['max_difference']:.1e}")
    print(f"with other images of the same size       {figures['other_images']:.1e}")
    figures["steps"] = train(policy, rows)
    print("\nstep      loss   mean ratio")
    for n, step in enumerate(figures["steps"]):
        print(f"{n:4}  {round(step['loss'], 5) + 0.0:+.5f}   {step['ratio']:10.6f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Trains with SkyRL on the guessing game, through tokencache. Needs skyrl[fsdp], GPUs, and a proxy (`docs/integrations/skyrl.md`).

python -m examples.integrations.skyrl_experiment data.train_data='["guessing.parquet"]' generator.step_wise_trajectories=true …
"""

import asyncio
import sys

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import initialize_ray

from examples.integrations.guessing import play
from tokencache.client import AsyncClient
from tokencache.integrations.skyrl import TokencacheGenerator

PROXY = "http://127.0.0.1:8100"


class Experiment(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        asyncio.run(add_engines(inference_engine_client.server_urls))
        step_wise = cfg.generator.step_wise_trajectories
        return TokencacheGenerator(PROXY, play, rows="all" if step_wise else "main", step_wise=step_wise)


async def add_engines(urls: list[str]) -> None:
    """Tell the proxy the vLLM servers that SkyRL has started."""
    async with AsyncClient(PROXY) as client:
        for url in urls:
            await client.add_engine(url)


@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig) -> None:
    Experiment(cfg).run()


if __name__ == "__main__":
    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    initialize_ray(config)
    ray.get(train.remote(config))

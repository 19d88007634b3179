"""Fixtures: the proxy in front of NeMo RL's worker, or of Gym's server and the worker, on the simulated engine."""

import contextlib

from tests.proxy.kit import EPISODES, proxied
from tests.system.nemo.gym_server import GymServer
from tests.system.nemo.worker import Worker
from tokencache.testing import SimulatedEngine


@contextlib.asynccontextmanager
async def before_worker(worker=Worker, engine=None, **settings):
    """Yields the rig and the worker; `worker` is its class."""
    engine = engine or SimulatedEngine(episodes=EPISODES, seed=7)
    async with engine.serve() as up:
        standing = worker(up, engine.tokenizer.encode("<|im_end|>")[0], max_model_len=engine.max_model_len)
        async with standing.serve() as url, proxied(engine, upstream=url, **settings) as rig:
            await ready(rig)
            standing.calls.clear()
            yield rig, standing


@contextlib.asynccontextmanager
async def before_gym(worker=Worker, engine=None, gym=None, **settings):
    """Yields the rig and Gym's server."""
    engine = engine or SimulatedEngine(episodes=EPISODES, seed=7)
    async with engine.serve() as up:
        behind = worker(up, engine.tokenizer.encode("<|im_end|>")[0])
        async with behind.serve() as between:
            standing = GymServer(between, **(gym or {}))
            standing.behind = behind
            async with standing.serve() as url, proxied(engine, upstream=url, **settings) as rig:
                await ready(rig)
                standing.calls.clear()
                yield rig, standing


async def ready(rig):
    """Probes for the name that harnesses use, and for none: then the probe's own calls are over."""
    await rig.proxy.engine.model()
    await rig.proxy.engine.model("sim")

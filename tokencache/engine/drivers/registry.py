"""The drivers there are, in the order in which `auto` tries them."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from tokencache.engine.drivers.base import Driver
from tokencache.engine.drivers.nemo_rl import NemoGym, NemoRl
from tokencache.engine.drivers.text_prompts import Completions
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.upstream import Upstream

EngineKind = Literal["auto", "vllm", "nemo-rl", "nemo-gym", "completions"]


class Ways(NamedTuple):
    """What drivers are made with.

    `sampling` is the policy for all sessions; `streams` whether streams may be asked for; `parser` who answers derender, the engine
    itself if it is `None`.
    """

    sampling: Mapping[str, Any]
    streams: bool = True
    parser: Upstream | None = None


DRIVERS: Mapping[str, Callable[[Ways], Driver]] = {
    "vllm": lambda ways: Vllm(streams=ways.streams),
    "nemo-rl": lambda ways: NemoRl(ways.sampling),
    "nemo-gym": lambda ways: NemoGym(ways.sampling),
    "completions": lambda ways: Completions(ways.parser),
}


def drivers(kind: EngineKind, ways: Ways) -> list[Driver]:
    """The drivers to try for `--engine`, in order."""
    return [make(ways) for name, make in DRIVERS.items() if kind in {"auto", name}]

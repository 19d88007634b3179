"""The drivers there are, in the order in which `auto` tries them."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from tokencache.engines.driver import Driver
from tokencache.engines.nemo import NemoGym, NemoRl
from tokencache.engines.vllm import Vllm

EngineKind = Literal["auto", "vllm", "nemo-rl", "nemo-gym"]
DRIVERS: Mapping[str, Callable[[Mapping[str, Any], bool], Driver]] = {
    "vllm": lambda _, streams: Vllm(streams=streams),
    "nemo-rl": lambda sampling, _: NemoRl(sampling),
    "nemo-gym": lambda sampling, _: NemoGym(sampling),
}
"""Each is made with the sampling policy for all sessions, and with whether it may be asked for streams."""


def drivers(kind: EngineKind, sampling: Mapping[str, Any], *, streams: bool = True) -> list[Driver]:
    """The drivers to try for `--engine`, in order."""
    return [make(sampling, streams) for name, make in DRIVERS.items() if kind in {"auto", name}]

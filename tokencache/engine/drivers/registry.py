"""Lists the drivers, in the order in which `--engine auto` tries them."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

from tokencache.engine.drivers.base import Driver
from tokencache.engine.drivers.dynamo import Dynamo
from tokencache.engine.drivers.nemo_gym import NemoGym
from tokencache.engine.drivers.nemo_rl import NemoRl
from tokencache.engine.drivers.text_prompts import TextPrompts
from tokencache.engine.drivers.token_prompts import TokenPrompts
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.upstream import Upstream

AUTO = "auto"


class DriverOptions(NamedTuple):
    """Options with which drivers are created.

    `sampling` is the trainer's policy for all sessions. `streams` is whether a driver may request streams. `parser` answers
    `/v1/chat/completions/render` and `derender`; if it is `None`, the engine does.
    """

    sampling: Mapping[str, Any] = {}
    streams: bool = True
    parser: Upstream | None = None


DRIVERS: dict[str, Callable[[DriverOptions], Driver]] = {
    Vllm.name: lambda options: Vllm(streams=options.streams, parser=options.parser),
    NemoRl.name: lambda options: NemoRl(options.sampling),
    NemoGym.name: lambda options: NemoGym(options.sampling),
    TextPrompts.name: lambda options: TextPrompts(options.parser),
    TokenPrompts.name: lambda options: TokenPrompts(options.parser),
    Dynamo.name: lambda _options: Dynamo(),
}


def _known(kind: str) -> str:
    if kind not in {AUTO, *DRIVERS}:
        raise ValueError(f"{kind[:80]!r} is not an engine; known are {', '.join([AUTO, *DRIVERS])}")
    return kind


EngineKind = Annotated[str, AfterValidator(_known)]
"""The value of `--engine`: the name of a driver, or `auto`."""


def drivers(kind: str, options: DriverOptions) -> list[Driver]:
    """Create the drivers to try for `--engine`, in order."""
    return [make(options) for name, make in DRIVERS.items() if kind in {AUTO, name}]

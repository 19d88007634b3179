"""Reads how many tokens an engine's KV cache holds, and computes how many sessions fit into all caches."""

import re

SHARE = 0.9
"""Share of the caches that sessions may fill. From 0.75 to 1.1 the makespan is the same; at 1.3 engines preempt all the time."""
_MOST_TOKENS = 10**12
_INFO = re.compile(rb"^vllm:cache_config_info(\{.*)\} ", re.MULTILINE)
_LABEL = re.compile(rb'[{,](\w++)="([^"]*)"')


class CapacityError(ValueError):
    """An engine does not say how large its KV cache is, or reports something that cannot be. The message describes it."""


def read_capacities(exposition: bytes) -> dict[str, int]:
    """Read the size of KV caches in the metrics of vLLM (0.32): the label `engine`, a data-parallel rank → tokens, at least one.

    `kv_cache_size_tokens` counts one rank, also with `--num-gpu-blocks-override`; `num_gpu_blocks` is the sum of all ranks. One block, the
    null block, holds no session.

    Raises:
        CapacityError: the metrics do not have it, or have something that cannot be.
    """
    found = dict[str, int]()
    for line in _INFO.finditer(exposition):
        labels = {name.decode(): value.decode(errors="replace") for name, value in _LABEL.findall(line[1])}
        rank = labels.get("engine", "0")
        tokens, block = (_number(name, labels.get(name)) for name in ("kv_cache_size_tokens", "block_size"))
        if rank in found:
            raise CapacityError(f"it reports two KV caches of the data-parallel rank {rank[:20]!r}")
        if tokens <= block:
            raise CapacityError(
                f"it reports a KV cache of {tokens} tokens in blocks of {block}, one of which holds no session: no session fits"
            )
        found[rank] = tokens - block
    if not found:
        raise CapacityError("its metrics have no vllm:cache_config_info")
    return found


def _number(name: str, value: str | None) -> int:
    if value is None or not (value.isascii() and value.isdecimal() and len(value) < len(str(_MOST_TOKENS))):
        raise CapacityError(f"its {name} is {'missing' if value is None else repr(value[:40])}, not a number of tokens")
    return int(value)


def sessions_that_fit(tokens: int, footprint: int) -> int | None:
    """Return how many sessions fit into caches of so many tokens; `None` if that is not known.

    Args:
        tokens: the size of all caches; 0 if not known.
        footprint: the mean number of tokens with which sessions ended; 0 if none ended yet.
    """
    return max(1, int(SHARE * tokens / footprint)) if tokens and footprint else None

"""Simulates weights that change: which weights computed each key and value, and what that does to log probabilities.

The simulated engine has no model. What matters about its weights is their name, `loaded`: it decides every log probability, together with
the keys and values of all tokens before. A cached key or value keeps the name of the weights that computed it. So a prompt that is found in
the prefix cache after a change of weights has other log probabilities than on an engine with an empty cache, as in vLLM (a *stale* prefix).

The prefix cache works as in vLLM: whole blocks, found by the ids up to their end and by the request's `cache_salt` and adapter.
"""

import hashlib
from collections.abc import Sequence

BLOCK = 16
"""Tokens in a block of the prefix cache."""
_Key = tuple[str, tuple[int, ...]]


class SimulatedWeights:
    """The weights of an engine, its LoRA adapters, and its prefix cache. Attributes may be changed while the engine serves.

    Attributes:
        loaded: name of the weights. While it is empty, log probabilities depend on the engine's seed only.
        label: what the engine reports as their version, whatever it has loaded.
        adapters: name of a LoRA adapter → its path. The path stands for the adapter's values, unless `overwritten` has others.
        overwritten: path → name of the values that are in the file since it was overwritten.
        cache: salt, and ids up to the end of a block → links of the block's keys and values (`KeysAndValues`).
        computed_by: link → name of the weights that computed it.
        recomputed: how often the keys and values of running requests were computed again.
    """

    def __init__(self) -> None:
        self.loaded, self.label = "", "default"
        self.adapters: dict[str, str] = {}
        self.overwritten: dict[str, str] = {}
        self.cache: dict[_Key, tuple[bytes, ...]] = {}
        self.computed_by: dict[bytes, str] = {}
        self.recomputed = 0

    def of(self, model: str) -> str:
        """Return the name of the weights that a model has now: with an adapter, that of both."""
        path = self.adapters.get(model)
        return self.loaded if path is None else f"{self.loaded}+{self.overwritten.get(path, path)}"

    def clear(self, *, running: bool) -> None:
        """Empty the prefix cache; with `running`, the keys and values of running requests are computed again, too."""
        self.cache.clear()
        self.recomputed += running

    def begin(self, model: str, salt: str, prompt: Sequence[int], *, reads_cache: bool = True) -> "KeysAndValues":
        """Compute a prompt, as far as it is not cached; its last token is never taken from the cache."""
        return KeysAndValues(self, model, salt, prompt, reads_cache=reads_cache)


class KeysAndValues:
    """The keys and values of one request.

    Attributes:
        cached: number of the prompt's tokens that were found in the cache.
        sampled: the name of the weights that sampled each token.
    """

    def __init__(self, weights: SimulatedWeights, model: str, salt: str, prompt: Sequence[int], *, reads_cache: bool = True) -> None:
        self._weights, self._model = weights, model
        self._salt = f"{salt}\0{weights.adapters.get(model, '')}"
        self._ids: list[int] = list(prompt)
        self._links: list[bytes] = []
        self.sampled: list[str] = []
        self._recomputed = weights.recomputed
        whole = (len(prompt) - 1) // BLOCK if reads_cache else 0
        self.cached = 0
        for block in range(whole):
            found = weights.cache.get(self._key(block))
            if found is None:
                break
            self._links += found
            self.cached += BLOCK
        self._compute()

    @property
    def versions(self) -> list[str]:
        """The names of the weights that computed the keys and values so far, one for each token."""
        return [self._weights.computed_by[link] for link in self._links]

    def prompt_chances(self) -> list[float]:
        """Return for each token of the prompt but the first the number that `chance` would return if it were sampled there."""
        version = self._weights.of(self._model)
        return [_number(_digest(self._links[place - 1], version, self._ids[place])) for place in range(1, len(self._ids))]

    def chance(self, token: int) -> float:
        """Return a number from 0 to 1 for the next token, which depends on the weights and on all keys and values; then append it."""
        if self._recomputed != self._weights.recomputed:
            self._recomputed, self._links = self._weights.recomputed, []
        self._compute()
        self.sampled.append(self._weights.of(self._model))
        drawn = _digest(self._links[-1] if self._links else b"", self.sampled[-1], token)
        self._ids.append(token)
        return _number(drawn)

    def _compute(self) -> None:
        version = self._weights.of(self._model)
        for place in range(len(self._links), len(self._ids)):
            link = _digest(self._links[-1] if self._links else b"", version, self._ids[place])
            self._weights.computed_by[link] = version
            self._links.append(link)
            if (place + 1) % BLOCK == 0:
                block = place // BLOCK
                self._weights.cache[self._key(block)] = tuple(self._links[block * BLOCK :])

    def _key(self, block: int) -> _Key:
        return self._salt, tuple(self._ids[: (block + 1) * BLOCK])


def _number(drawn: bytes) -> float:
    return int.from_bytes(drawn[:6], "little") / 2**48


def _digest(before: bytes, version: str, token: int) -> bytes:
    return hashlib.blake2b(before + version.encode() + b"\0%d" % token, digest_size=16).digest()

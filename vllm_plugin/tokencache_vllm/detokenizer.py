"""Starts vLLM's detokenizer with the end of a prompt instead of all of it, where that gives the same text.

Before the first token of a reply, `tokenizers.decoders.DecodeStream` decodes the whole prompt twice, to find which characters the token
adds: 7 ms of the API server for 32,000 tokens (`tokenizers` 0.22, the CPU of docs/performance.md), the largest part of such a call that
still grows with the prompt. Afterwards it needs none of it.

For a `ByteLevel` decoder, the text of ids is the bytes of all of them, joined, and decoded as UTF-8. So the text of A + B is the text of A
and then the text of B, if the bytes of B do not begin within a character. Then the stream adds the same characters after B as after A + B
(`step_decode_stream` compares only what is added). The text of B must not be empty, and must not end within a character: the stream treats
both in a special way. For all other decoders, and where no such B is found, the stream starts with the whole prompt.
"""

import copy
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from tokencache_vllm.patch import MARK, UnknownVllmError, check_signature
from tokencache_vllm.response_headers import served

_LONGEST = 16
"""Ids to start with, at most."""
_REPLACEMENT = "\ufffd"
_MODULE = "vllm.v1.engine.detokenizer"


def sufficient_end(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool) -> list[int] | None:
    """Return the last ids of a prompt after which a decoding stream adds the same text as after all of them.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        ids: the prompt.
        skip_special_tokens: as the stream does.

    Returns:
        The ids; `None` if they are not known to suffice.
    """
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        return None
    end = list(ids[-_LONGEST:])
    while end:
        first = tokenizer.decode(end[:1], skip_special_tokens)
        if first and not first.startswith(_REPLACEMENT):
            return None if tokenizer.decode(end, skip_special_tokens).endswith(_REPLACEMENT) else end
        del end[0]
    return None


def patch_detokenizer(load: Callable[[str], Any] = importlib.import_module) -> None:
    """Wrap the constructor of `FastIncrementalDetokenizer` (vLLM 0.27 to 0.33) for prompts by hash; a second call changes nothing.

    Raises:
        UnknownVllmError: the code of this vLLM is not as expected. Nothing was changed.
    """
    try:
        detokenizer = load(_MODULE).FastIncrementalDetokenizer
    except (ImportError, AttributeError) as why:
        raise UnknownVllmError(f"its code is not as expected: {why}") from why
    original = detokenizer.__init__
    if hasattr(original, MARK):
        return
    check_signature(original, "FastIncrementalDetokenizer.__init__", (["self", "tokenizer", "request"],), coroutine=False)

    @functools.wraps(original)
    def start(self: Any, tokenizer: Any, request: Any) -> None:
        asked = served()
        if asked is not None and asked.prefixed is not None and request.prompt_token_ids:
            skips = request.sampling_params.skip_special_tokens
            end = sufficient_end(tokenizer._tokenizer, request.prompt_token_ids, skip_special_tokens=skips)  # noqa: SLF001 - vLLM uses it
            if end is not None:
                request = copy.copy(request)  # the engine gets the whole prompt
                request.prompt_token_ids = end
        original(self, tokenizer, request)

    setattr(start, MARK, original)
    detokenizer.__init__ = start

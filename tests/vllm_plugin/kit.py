"""The parts of vLLM that the plugin uses, with real templates; signatures as in vLLM 0.25.1 and 0.20.0."""

import asyncio
import types
from dataclasses import dataclass, field
from typing import Any

from tests.engine.template.shapes import TOOLS
from tests.engine.template.template_lab import KINDS, Lab
from tokencache_vllm.patch import patch

MAX_MODEL_LEN = 4096


class BadRequestError(ValueError):
    """vLLM's `VLLMValidationError`: the server answers 400."""

    def __init__(self, message, *, parameter=None):
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True)
class ChatParams:
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizeParams:
    max_total_tokens: int | None = MAX_MODEL_LEN
    max_output_tokens: int = 0
    truncate_prompt_tokens: int | None = None

    def apply_post_tokenization(self, _tokenizer, prompt):
        if self.max_total_tokens is not None and len(prompt["prompt_token_ids"]) > self.max_total_tokens - self.max_output_tokens:
            raise BadRequestError("This model's maximum context length is exceeded", parameter="input_tokens")
        return prompt


class Request:
    """A request of any dialect: members that the model does not know are in `model_extra`."""

    def __init__(self, *, kv_transfer_params=None, vllm_xargs=None, echo=False, stop_token_ids=None, tok=None, template=None, **extra):
        self.kv_transfer_params, self.vllm_xargs, self.echo, self.stop_token_ids = kv_transfer_params, vllm_xargs, echo, stop_token_ids
        self.tok, self.template = tok or TokenizeParams(), template or {}
        self.model_extra = extra


class BaseRenderer:
    """vLLM's renderer, with a template of the lab."""

    def __init__(self, kind, *, shared=False):
        self.lab = Lab.of(kind, shared=shared, objects=not (shared and kind.name == "DeepSeek-V3"))
        self.rendered = 0
        words = self.lab.words
        self.tokenizer = types.SimpleNamespace(decode=words.decode, eos_token_id=None, max_token_id=max(words._tokens))

    async def render_chat_async(self, conversations, chat_params, tok_params=None, *, prompt_extras=None, skip_mm_cache=False):
        self.rendered += 1
        (messages,) = conversations
        kwargs = dict(chat_params.chat_template_kwargs)
        tools, generation = kwargs.pop("tools"), kwargs.pop("add_generation_prompt", True)
        kwargs.pop("continue_final_message", None)
        try:
            text = self.lab.text(messages, tools, generation=generation, **kwargs)
        except Exception as why:
            raise ValueError(f"the template refuses: {why}") from why
        await asyncio.sleep(0)
        prompt = {"type": "token", "prompt_token_ids": self.lab.words.encode(text), "prompt": text, **(prompt_extras or {})}
        return [list(messages)], [prompt if tok_params is None else tok_params.apply_post_tokenization(self.tokenizer, prompt)]


class Renderer:
    """Stands in for vLLM's `OnlineRenderer`."""

    def __init__(self, kind, *, shared=False):
        self.renderer = BaseRenderer(kind, shared=shared)
        self.seen = []
        stops = [self.renderer.lab.words.id_of(token) for token in kind.stops]
        vocabulary = self.renderer.tokenizer.max_token_id + 1
        self.model_config = types.SimpleNamespace(
            max_model_len=MAX_MODEL_LEN,
            hf_config=types.SimpleNamespace(eos_token_id=stops[0]),
            get_vocab_size=lambda: vocabulary,
            try_get_generation_config=lambda: {"eos_token_id": stops},
        )

    async def preprocess_chat(  # noqa: PLR0917 - vLLM's
        self,
        request,
        messages,
        default_template,
        default_template_content_format,
        default_template_kwargs,
        tool_dicts=None,
        parser=None,
        *,
        skip_mm_cache=False,
    ):
        tok_params = request.tok
        chat_params = ChatParams({"tools": tool_dicts, **request.template})
        (conversation,), (engine_input,) = await self.renderer.render_chat_async(
            [messages], chat_params, tok_params, prompt_extras={}, skip_mm_cache=skip_mm_cache
        )
        self.seen.append((parser, request.kv_transfer_params, request.vllm_xargs))
        return conversation, [engine_input]


async def older(  # noqa: PLR0917 - vLLM's
    self,
    request,
    messages,
    default_template,
    default_template_content_format,
    default_template_kwargs,
    tool_dicts=None,
    tool_parser=None,
    reasoning_parser=None,
    *,
    skip_mm_cache=False,
):
    """`preprocess_chat` of 0.20."""
    return await Renderer.preprocess_chat(
        self, request, messages, default_template, default_template_content_format, default_template_kwargs, tool_dicts, tool_parser
    )


def tokens_input(ids, *, prompt=None, cache_salt=None):
    return {"type": "token", "prompt_token_ids": ids}


def vllm(**replaced):
    """A function that imports the modules of a vLLM by name; `replaced` has the modules that differ in this one."""
    methods = {"preprocess_chat": Renderer.preprocess_chat, "__init__": Renderer.__init__}
    modules = {
        "vllm.renderers.online_renderer": {"OnlineRenderer": type("OnlineRenderer", (), methods)},
        "vllm.entrypoints.serve.render.serving": {"OpenAIServingRender": type("OpenAIServingRender", (), methods)},
        "vllm.renderers.base": {"BaseRenderer": BaseRenderer},
        "vllm.inputs.engine": {"tokens_input": tokens_input},
        "vllm.exceptions": {"VLLMValidationError": BadRequestError},
    } | {name.replace("__", "."): members for name, members in replaced.items()}

    def load(name):
        if name not in modules:
            raise ImportError(f"No module named {name!r}")
        return types.SimpleNamespace(**modules[name])

    return load


class Server:
    """A patched vLLM 0.25 that serves a model with a template of the lab."""

    def __init__(self, kind="Qwen3", *, shared=False):
        self.kind = KINDS[kind]
        load = vllm()
        patch("0.25.1", load)
        self.online = load("vllm.renderers.online_renderer").OnlineRenderer(self.kind, shared=shared)
        self.words = self.online.renderer.lab.words
        self.lab = self.online.renderer.lab

    async def prompt(self, messages, *, tools=True, **fields):
        """The ids that the engine would be given for a request."""
        _, (engine_input,) = await self.online.preprocess_chat(
            Request(**fields), messages, None, "auto", None, tool_dicts=TOOLS if tools else None, parser="parser"
        )
        assert "prompt" not in engine_input or not fields.get("required_prefix_token_ids")
        return engine_input["prompt_token_ids"]

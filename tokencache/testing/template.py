"""Defines and renders the chat template of the simulated model.

A *chat template* is a Jinja program that belongs to a model. A server runs it over the messages and tools of a request; the result is the
text that the model reads. The template below was written for this project. Its output has the format of Qwen3 (ChatML turns, Hermes tool
calls in XML tags, `<think>` blocks), because that format has most of the properties that make exact prefixes hard:

* thinking of turns before the last user query is omitted, so a rendering of the same history changes over time;
* consecutive tool results are wrapped in one user turn;
* text around calls and thinking is trimmed, and arguments are written again as JSON;
* a turn ends with `<|im_end|>` and a newline. The model emits only the first; the template adds the newline.

Rendering follows Hugging Face transformers (`utils/chat_template_utils.py`): an immutable sandbox, `trim_blocks` and `lstrip_blocks` on, a
`tojson` filter that keeps non-ASCII characters, and a function `raise_exception`.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHAT_TEMPLATE = r"""
{%- macro turn(role, body) -%}
    {{- '<|im_start|>' + role + '\n' + body + '<|im_end|>\n' }}
{%- endmacro %}
{%- set preamble = '' %}
{%- if messages[0].role == 'system' %}
    {%- set preamble = messages[0].content %}
{%- endif %}
{%- if tools %}
    {%- set menu = namespace(lines='') %}
    {%- for tool in tools %}
        {%- set menu.lines = menu.lines + '\n' + (tool | tojson) %}
    {%- endfor %}
    {{- turn('system', (preamble + '\n\n' if messages[0].role == 'system' else '')
        + '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n'
        + 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' + menu.lines + '\n</tools>\n\n'
        + 'For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n'
        + '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>') }}
{%- elif messages[0].role == 'system' %}
    {{- turn('system', preamble) }}
{%- endif %}
{#- A query is what a user said: not a tool result dressed up as a user message. -#}
{%- set query = namespace(at=messages | length - 1, found=false) %}
{%- for message in messages | reverse %}
    {%- if not query.found and message.role == 'user' and message.content is string
            and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set query.found = true %}
        {%- set query.at = loop.revindex0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- turn(message.role, text) }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + text + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif message.role == 'assistant' %}
        {%- set said = namespace(thinking='', text=text, calls='') %}
        {%- if message.reasoning_content is string %}
            {%- set said.thinking = message.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set said.thinking = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set said.text = text.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson %}
            {%- set said.calls = said.calls + ('\n' if said.text or not loop.first else '')
                + '<tool_call>\n{"name": "' + function.name + '", "arguments": ' + arguments + '}\n</tool_call>' %}
        {%- endfor %}
        {%- if loop.index0 > query.at and (loop.last or said.thinking) %}
            {%- set opening = '<think>\n' + said.thinking.strip('\n') + '\n</think>\n\n' + said.text.lstrip('\n') %}
            {{- turn('assistant', opening + said.calls) }}
        {%- else %}
            {{- turn('assistant', said.text + said.calls) }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""".strip()
"""Jinja source. Needs `messages`; takes `tools`, `add_generation_prompt` and `enable_thinking`."""


def _raise_exception(message: str) -> NoReturn:
    """Let a template refuse a conversation (`raise_exception('…')`), as published templates do."""
    raise TemplateError(message)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> Template:
    """Compile the Jinja text `source` in a sandbox, once per process."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # nothing is escaped for HTML
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    **arguments: Any,
) -> str:
    """Run the template `source` over OpenAI-style `messages` and `tools`. Returns the prompt's text.

    `arguments`: the `chat_template_kwargs` of a request, for example `enable_thinking=False`.
    """
    return _rendered(
        source, json.dumps({"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt, **arguments})
    )


@functools.lru_cache(maxsize=1000)  # the proxy and its tests ask for the same renderings again and again
def _rendered(source: str, values: str) -> str:
    return compile_template(source).render(json.loads(values))

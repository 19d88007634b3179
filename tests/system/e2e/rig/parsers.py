"""Runs the parsers of vLLM's chat without an engine, as its server does: `chat_completion/serving.py` (0.32).

usage: python parsers.py TOKENIZER_DIR < COMMANDS > ANSWERS        in vLLM's environment

Each line of the input is a list, and each line of the output the answer to one, or `{"error": "why"}`:

    ["use", NAME]             use this reasoning parser, with the tool parser `hermes`
    ["ended", PROMPT]         whether the parser finds the end of a thought in the prompt's ids: a grammar starts at once
    ["whole", PROMPT, TEXT]   [reasoning, content] of a whole reply
    ["stream", PROMPT]        begin a stream; the answer is its number
    ["feed", NUMBER, TEXT, FINISHED]     [reasoning, content] of its next piece
    ["calls", NAME, TOKENS, TEXT]     what this tool parser makes of a reply: [content, calls] as a whole, and the same streamed token by
                              token; parsers look the tokens of their models up in the vocabulary
"""

import json
import sys
import warnings

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

warnings.simplefilter("ignore")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
REQUEST = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], model="sim")
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
FUNCTIONS = {"bash": {"cmd": TEXT, "timeout": NUMBER}, "read": {"path": TEXT}}
WITH_TOOLS = ChatCompletionRequest(
    messages=[{"role": "user", "content": "hi"}],
    model="sim",
    tools=[
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": members}}}
        for name, members in FUNCTIONS.items()
    ],
)
streams = []
made = {}


def use(name):
    made["class"] = ParserManager.get_parser(
        tool_parser_name="hermes", reasoning_parser_name=name, enable_auto_tools=True, tokenizer=tokenizer
    )
    new()
    return name


def new():
    return made["class"](tokenizer, None, chat_template_kwargs={}, model_config=None)


def encoded(text):
    return tokenizer.encode(text, add_special_tokens=False)


def ended(prompt):
    return new().is_reasoning_end(prompt)


def whole(prompt, text):
    parser = new()
    parser.set_prompt_token_ids(prompt)
    reasoning, content, _ = parser.parse(text, REQUEST, enable_auto_tools=True, model_output_token_ids=encoded(text))
    return [reasoning, content]


def stream(prompt):
    streams.append((new(), prompt))
    return len(streams) - 1


def feed(number, text, finished):
    parser, prompt = streams[number]
    delta = parser.parse_delta(text, encoded(text), REQUEST, prompt, finished=finished)
    return [delta.reasoning, delta.content] if delta is not None else [None, None]


def calls(name, tokens, text):
    tokenizer.add_tokens(tokens)
    kind = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True)
    parser = kind(tokenizer, WITH_TOOLS.tools, chat_template_kwargs={}, model_config=None)
    parser.set_prompt_token_ids([1])
    _, content, found = parser.parse(text, WITH_TOOLS, enable_auto_tools=True, model_output_token_ids=encoded(text))
    whole = [content, [[call.name, call.arguments] for call in found or ()]]
    parser = kind(tokenizer, WITH_TOOLS.tools, chat_template_kwargs={}, model_config=None)
    content, made, pieces = "", {}, [tokenizer.decode([token]) for token in encoded(text)]
    for number, piece in enumerate(pieces, 1):
        delta = parser.parse_delta(piece, encoded(piece), WITH_TOOLS, [1], finished=number == len(pieces))
        content += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            parts = made.setdefault(call.index, ["", ""])
            parts[0] += (call.function and call.function.name) or ""
            parts[1] += (call.function and call.function.arguments) or ""
    return whole, [content or None, [made[index] for index in sorted(made)]]


COMMANDS = {"calls": calls, "use": use, "ended": ended, "whole": whole, "stream": stream, "feed": feed}
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        answer = COMMANDS[name](*arguments)
    except Exception as why:  # noqa: BLE001 - the test shows it
        answer = {"error": f"{type(why).__name__}: {why}"}
    print(json.dumps(answer), flush=True)

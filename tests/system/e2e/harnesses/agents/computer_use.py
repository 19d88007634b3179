"""A computer-use loop on the official Anthropic client. usage: computer_use.py TASK

It sends a screenshot as the result of every call, and removes old ones as the loop of Anthropic's own demonstration does: all but the last
`KEPT`, in steps of `AT_ONCE`, in the results themselves. The screen is a file for each step: `screen-1.png`, …
"""

import base64
import itertools
import os
import sys
from pathlib import Path

from anthropic import Anthropic

KEPT, AT_ONCE = 2, 2
COMPUTER = {
    "name": "computer",
    "description": "Use the computer: look at its screen, click, type.",
    "input_schema": {
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": ["screenshot", "left_click", "type"]},
            "coordinate": {"type": "array", "items": {"type": "integer"}},
            "text": {"type": "string"},
        },
        "required": ["action"],
    },
}


def result(use, step):
    """The result of a call: some words and a screenshot."""
    data = base64.b64encode(Path(f"screen-{step}.png").read_bytes()).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    return {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": f"{use.input['action']}: done"}, image]}


def remove_old_screenshots(messages):
    results = [block for message in messages if message["role"] == "user" for block in message["content"] if block["type"] == "tool_result"]
    shots = sum(part["type"] == "image" for block in results for part in block["content"])
    surplus = max(0, shots - KEPT)
    surplus -= surplus % AT_ONCE
    for block in results:
        kept = []
        for part in block["content"]:
            if part["type"] == "image" and surplus:
                surplus -= 1
            else:
                kept.append(part)
        block["content"] = kept


client = Anthropic()
history = [{"role": "user", "content": [{"type": "text", "text": sys.argv[1]}]}]
for number in itertools.count(1):
    remove_old_screenshots(history)
    with client.messages.stream(
        model=os.environ["ANTHROPIC_MODEL"], max_tokens=4096, system="You use a computer.", messages=history, tools=[COMPUTER]
    ) as stream:
        answer = stream.get_final_message()
    history.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
    uses = [block for block in answer.content if block.type == "tool_use"]
    if not uses:
        break
    history.append({"role": "user", "content": [result(use, number) for use in uses]})

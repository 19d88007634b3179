"""A server of two tools over MCP's standard input and output: JSON-RPC, one message a line. Standard library only."""

import json
import sys

NOTES = {"plan": "First look — naïve ☕.\nThen write.", "end": "Nothing more ✅."}
NAMED = {"type": "object", "properties": {"name": {"type": "string", "description": "The note's name."}}, "required": ["name"]}
TOOLS = [
    {"name": "read_note", "description": "Read a note.", "inputSchema": NAMED},
    {"name": "list_notes", "description": "List the names of all notes.", "inputSchema": {"type": "object", "properties": {}}},
]


def call(name, arguments):
    text = NOTES.get(arguments.get("name"), "There is no such note.") if name == "read_note" else "\n".join(NOTES)
    return {"content": [{"type": "text", "text": text}]}


def answer(method, given):
    """The result of a request; `None` for a method that this server does not have."""
    if method == "initialize":
        return {
            "protocolVersion": given["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "notes", "version": "1"},
        }
    if method == "tools/call":
        return call(given["name"], given.get("arguments") or {})
    return {"tools/list": {"tools": TOOLS}, "ping": {}}.get(method)


def main():
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        result = answer(asked["method"], asked.get("params") or {})
        found = {"result": result} if result is not None else {"error": {"code": -32601, "message": "no such method"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **found}), flush=True)


if __name__ == "__main__":
    main()

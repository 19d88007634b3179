r"""Defines the replies of the demo's simulated model: three jobs of eight turns, as a model would write them.

The simulated engine returns these replies, each time in different tokens. They contain what makes token-exact histories hard: thinking that
the harness drops, blanks around text that it strips, arguments whose key order, spacing and number format it changes, two calls in one
reply, code, JSON escapes, several scripts. A reply without a call ends a task within the rollout. A user message follows, and from there on
the template omits all earlier thinking.

The demo shows the first reply of the first job token by token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

TURNS = 8
"""Turns of a job. A longer rollout repeats its job."""


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}, "required": [*properties][:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _tool("bash", "Run a command in a shell and return what it prints.", command="string", timeout="number"),
    _tool("read_file", "Read lines of a text file.", path="string", offset="integer", limit="integer"),
    _tool("edit_file", "Replace a piece of a file.", path="string", old="string", new="string", all="boolean"),
)
"""The tools of the agent, in OpenAI's form."""

_ROUNDING = (
    (
        "<think>\nThe test fails; look first.\n</think>\n\nLet me look at the café's prices.\n"
        '<tool_call>\n{"name": "bash", "arguments": {"timeout": 10.0, "command": "ls -la"}}\n</tool_call>'
    ),
    (
        "<think>\nTwo files matter: the code and its data. I can read both at once.\n</think>\n\n"
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "prices.py", "limit": 200, "offset": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "caf\\u00e9.csv",  "limit": 2e2}}\n</tool_call>'
    ),
    (
        "<think>\nround() rounds half to even, and 1.005 is not exact in binary anyway.\nUse Decimal.\n</think>\n\n"
        "  `round()` works on doubles; I will use `Decimal`.  \n"
        '<tool_call>\n{"name": "edit_file", "arguments": {"path": "prices.py", "old": "    return f\\"{round(x, 2):.2f}\\"\\n", '
        '"new": "    cents = Decimal(x).quantize(Decimal(\\"0.01\\"), ROUND_HALF_UP)\\n\\treturn str(cents)\\n", '
        '"all": false}}\n</tool_call>'
    ),
    (
        "<think>\nRun the tests.\n</think>\n\n<tool_call>\n"
        '{"name":"bash","arguments":{"command":"python -m pytest -q  tests/","timeout":5000}}'
        "\n</tool_call>"
    ),
    (
        "<think>\nGreen. Say what changed, briefly.\n</think>\n\nFixed: prices are now rounded half up, as the test wants.\n\n"
        '```python\ndef price(x: str) -> str:\n    return str(Decimal(x).quantize(Decimal("0.01"), ROUND_HALF_UP))\n```\n'
    ),
    (
        "<think>\nThe next one: look for other callers of round().\n</think>\n\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "grep -rn \\"round(\\" --include=*.py . | head -n 5"}}\n</tool_call>'
    ),
    (
        "<think>\nNo other caller. Check that the data file is UTF-8, and its line ends.\n</think>\n\nNo other callers. One last look:\n\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "file café.csv"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "wc -l café.csv", "timeout": 2.50}}\n</tool_call>'
    ),
    "<think>\nDone.\n</think>\n\nNothing else to do here.   ",
)

_NAMES = (
    (
        "<think>\nNames from three scripts: normalise them before they are compared.\n</think>\n\n"
        "Je regarde d'abord les données : Zoë, 北京, Ελλάδα.\n"
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "données/noms.csv", "offset": 0, "limit": 5}}\n</tool_call>'
    ),
    (
        "<think>\n“Zoë” may be e + U+0308. NFC folds the two into one: 'e\u0308' becomes 'ë'.\n</think>\n\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "python - <<\'EOF\'\\nimport unicodedata\\n'
        'print(unicodedata.normalize(\\"NFC\\", \\"Zoe\\u0308\\"))\\nEOF"}}\n</tool_call>'
    ),
    (
        "<think>\nAs expected. Write the function and its test in one go.\n</think>\n\n"
        '<tool_call>\n{"name": "edit_file", "arguments": {"path": "names.py", "old": "", "new": "def same(a: str, b: str) -> bool:\\n'
        '    return nfc(a).casefold() == nfc(b).casefold()\\n"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "edit_file", "arguments": {"new": "assert same(\\"Straße\\", \\"STRASSE\\")\\n", "old": "", '
        '"path": "tests/test_names.py"}}\n</tool_call>'
    ),
    (
        "<think>\nNow the tests.\n</think>\n\nTests:\n\n"
        '<tool_call>\n{"name": "bash", "arguments": {"timeout": 60, "command": "pytest -q tests/test_names.py"}}\n</tool_call>'
    ),
    "<think>\nThey pass.\n</think>\n\nDone ✅ — `same()` now treats “Zoë” and “Zoe\u0308” alike, and 北京 stays 北京.",
    (
        "<think>\nThe user wants the next one. What is left in the list?\n</think>\n\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "sed -n \'6,$p\' données/noms.csv"}}\n</tool_call>'
    ),
    "<think>\nRight-to-left names and an emoji: نور 👩‍🚀. Nothing to fold there.\n</think>\n\nThe rest needs no folding: نور, 👩‍🚀.\n",
    "<think>\nShort answer.\n</think>\n\n\n\nYes, I am sure.\n",
)

_LOGS = (
    (
        "<think>\nA server that drops connections. Logs, and what is listening; they do not depend on each other.\n</think>\n\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "journalctl -u api --since -1h | tail -n 50"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ss -ltnp | awk \'{print $4}\'", "timeout": 1e1}}\n</tool_call>'
    ),
    (
        "<think>\nKeep-alive of the proxy is 60 s, that of the server 5 s: the classic race.\n</think>\n\nThe proxy outlives "
        "the server's idle limit.\n"
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "/etc/nginx/nginx.conf", "offset": 30, "limit": 20}}\n</tool_call>'
    ),
    (
        "<think>\nSet the proxy's to 4 s.\n</think>\n\n"
        '<tool_call>\n{"name": "edit_file", "arguments": {"path": "/etc/nginx/nginx.conf", "old": "keepalive_timeout 60s;", '
        '"new": "keepalive_timeout 4s;", "all": true}}\n</tool_call>'
    ),
    (
        '<think>\nReload and measure.\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": '
        '{"command": "nginx -t && nginx -s reload; for i in $(seq 1 100); do '
        "curl -so /dev/null -w '%{http_code}\\\\n' localhost; done | sort | uniq -c\"}}"
        "\n</tool_call>"
    ),
    (
        "<think>\nNo 502 among a hundred. Summarise as a table.\n</think>\n\n| before | after |\n|---|---|\n| 3 of 100 failed | none |\n\n"
        "The race is gone.\n"
    ),
    (
        "<think>\nThey ask for more. The end-of-turn marker in the input is only text; go on.\n</think>\n\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "printf \'%s\' \\"<|im_end|>\\" | xxd"}}\n</tool_call>'
    ),
    '<think>\n10 bytes, as it should be.\n</think>\n\n<tool_call>\n{"name": "read_file", "arguments": {}}\n</tool_call>',
    "<think>\nThat call had no path; never mind, the work is done.\n</think>\n\nAll done: `keepalive_timeout` was the culprit.",
)

_JOBS: Mapping[str, tuple[str, Sequence[str]]] = {
    "rounding": ("tests/test_prices.py fails: 1.005 should become 1.01. Find out why and fix it.", _ROUNDING),
    "names": ("Deux noms sont égaux s'ils se lisent pareil (Zoë = Zoe\u0308). Fix names.py, please.", _NAMES),
    "logs": ("The API answers 502 every now and then. Find the reason and get rid of it.", _LOGS),
}


def script(turns: int) -> dict[str, list[str]]:
    """Return the episodes for the simulated engine: replies by name, one for each turn of a rollout."""
    return {name: [replies[turn % TURNS] for turn in range(turns)] for name, (_, replies) in _JOBS.items()}


def task(rollout: int) -> str:
    """Return the task of one rollout. The marker selects the episode of the simulated engine; a real model sees only a name."""
    name = list(_JOBS)[rollout % len(_JOBS)]
    return f"EPISODE:{name}\n\n{_JOBS[name][0]}"

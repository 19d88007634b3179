"""`docs/engines.md`: what was run on which vLLM. The file is this module's output, never edited by hand."""

from dataclasses import dataclass, field

COLUMNS = {
    "level": "level that the probe finds",
    "chat": "chat",
    "chat, streamed": "chat, streamed",
    "messages": "Messages",
    "responses": "Responses",
    "prefix": "`required_prefix_token_ids`",
}
HEAD = """\
# Engines, measured

What the proxy can do depends on what stands upstream. It is found out at start by asking (`tokencache/engine/probe.py`), never by a
version number, written to the log, and shown by `/readyz`:

| level | what the engine does | what sessions are |
|---|---|---|
| `exact` | takes the ids of a whole prompt, and tokenizes | every turn that can be proven to continue another starts with its exact ids |
| `record` | says which ids it used, but takes none | every turn is recorded as it really was, and none continues another |
| `relay` | says no ids | calls are relayed and marked; nothing can be recorded |

Engines other than vLLM, and how what stands there is found out: [drivers](drivers.md).

vLLM takes ids by itself from 0.27 on. For 0.20 to 0.26 the project ships a plugin, installed where vLLM is:

    pip install '.[vllm]'       # in this repository, with vLLM's own pip; it leaves vLLM as it is
    VLLM_PLUGINS=tokencache vllm serve MODEL …       # 0.26 wants it named; the others load it if the variable is not set, too

It says once at start what it wrapped; a vLLM that it does not know is left alone, loudly. With it a request may have

- `kv_transfer_params: {"prompt_token_ids": […]}`: the whole prompt, as natively from 0.27 on;
- `required_prefix_token_ids: […]`, on chat completions and `/tokenize` at the top of the body as for NeMo RL's worker, in
  `kv_transfer_params` or `vllm_xargs` for Messages and Responses: vLLM renders the messages, and the exact ids take the place of
  everything up to the end of the last assistant message. Where that end cannot be proven the answer is 400 with the reason. An
  empty list means nothing.

Refused with 400, where 0.27 to 0.32 ignore the ids: media in the conversation, and `echo`. Left as it is: gpt-oss, whose
prompts are rendered elsewhere (Harmony); the probe finds `record`. vLLM's Rust frontend loads no plugin and ignores ids: `record`.
On `/v1/chat/completions/batch`, which later versions refuse ids on, each conversation of the batch is given them.

## What was run

On vLLM's CPU build, each version without the plugin and with it, through the proxy, with a scripted model that says everything in
tokens that its tokenizer would not choose. *n of m*: so many follow-up turns start with all ids of the turn before, prompt and
completion, by the engine's own echo (chat) or its own books (Messages, Responses). `required_prefix_token_ids` is asked of the engine
directly, without the proxy, on chat, `/tokenize`, Messages and Responses. The proxy is told `--engine vllm`: by
itself it continues sessions on 0.24 to 0.26 without the plugin, too, by token prompts and derender ([drivers](drivers.md)).

The table is written by `make e2e-versions VLLM_VERSIONS="0.24 0.25"` (those, if none are named), from a run of the tests in
`tests/system/e2e_versions`; what was not run again keeps its line.

"""


@dataclass
class Row:
    """One version, with the plugin or without."""

    version: str
    plugin: bool
    cells: dict = field(default_factory=dict)

    def count(self, column, done, of):
        """Add follow-up turns: `done` of them extend the turn before."""
        before, total = self.cells.get(column, (0, 0))
        self.cells[column] = (before + done, total + of)

    def line(self):
        cells = [self.cells.get(column, "not run") for column in COLUMNS]
        texts = [f"{cell[0]} of {cell[1]}" if isinstance(cell, tuple) else cell for cell in cells]
        return "| " + " | ".join([self.version, "with" if self.plugin else "without", *texts]) + " |\n"


_ROWS = {}


def row(version, *, plugin):
    return _ROWS.setdefault((version, plugin), Row(version, plugin))


def write(path):
    """Write the document with what was measured in this run; lines of versions that were not run stay as they are."""
    names = ["vLLM", "plugin", *COLUMNS.values()]
    lines = {}
    if path.exists():
        _, _, table = path.read_text(encoding="utf-8").partition(f"{_RULE}\n")
        lines = {_of(line): f"{line}\n" for line in table.splitlines()}
    lines |= {(each.version, "with" if each.plugin else "without"): each.line() for each in _ROWS.values()}
    ordered = sorted(lines, key=lambda each: ([int(part) for part in each[0].split(".")[:2]], each[0], each[1] == "with"))
    path.write_text(HEAD + "| " + " | ".join(names) + f" |\n{_RULE}\n" + "".join(lines[each] for each in ordered), encoding="utf-8")


_RULE = "|" + "---|" * (2 + len(COLUMNS))


def _of(line):
    version, plugin = line.split(" | ")[:2]
    return version.removeprefix("| "), plugin

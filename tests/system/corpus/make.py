"""Makes files of the corpus from recorded runs of the harness tests.

usage: python -m tests.system.corpus.make RUNS [HARNESS …] [--out FOLDER]

`RUNS` holds one folder per run, named after the harness (`codex`, or `codex-proxied`; `codex_agents` for a run of another kind). It has
`calls.jsonl`, written by `tests/system/e2e/harnesses/recording_relay.py`, and `export.json`, the session's trajectories as the proxy
exported them afterwards. The engine of these tests uses the simulated engine's tokenizer, so the exported ids are decoded with that.

The recording is sanitised (`sanitise`), and a check verifies that no run of 40 characters of a replaced text is left. If it fails, nothing
is written.
"""

import argparse
import hashlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.system.corpus import format as corpus_format
from tests.system.corpus.format import Call, Header, Recording
from tests.system.corpus.recorded import Exchange, MakeError, Run, read_run, streams
from tests.system.corpus.replies import read_reply
from tests.system.corpus.sanitise import RUN, Sanitiser, asked_in, strings_in
from tokencache.adapters import load

_HEADERS = {
    "accept", "anthropic-beta", "anthropic-version", "content-type", "originator", "session-id", "thread-id", "user-agent",
    "x-claude-code-agent-id", "x-claude-code-parent-agent-id", "x-claude-code-session-id", "x-client-request-id",
    "x-codex-parent-thread-id", "x-codex-window-id", "x-goog-api-client", "x-litellm-session-id", "x-openai-subagent",
    "x-parent-session-id", "x-session-affinity", "x-session-id", "x-stainless-retry-count",
}  # fmt: skip
_RECORDED = (
    "The program itself, unchanged, in the lab of tests/system/e2e/harnesses: through the proxy, to {engine} that says what is scripted. "
    "A tap between program and proxy wrote down every byte."
)
_REPLACED = (
    "Texts of the harness's makers by words of the same lengths; of tools' results the words that are not the task's; identities, "
    "hosts and dates. To the letter: the model's turns as they came back, names, schemas, settings."
)


def make(name: str, folder: Path, out: Path) -> Path:
    """Makes the file of one run; returns its path.

    Raises:
        MakeError: A part of it cannot be understood, or would not be sanitised.
    """
    run = read_run(folder)
    bodies = [json.loads(exchange.call["request_body"]) for exchange in run.exchanges]
    asked = asked_in(bodies)
    ids = {value for exchange in run.exchanges for _, value in exchange.reply.served}
    key = hashlib.sha256((folder / "calls.jsonl").read_bytes()).digest()
    sanitiser = Sanitiser(key, asked, _said(run), ids)
    calls = [_call(at, run, sanitiser.body(body), sanitiser) for at, body in enumerate(bodies, 1)]
    adapter = run.adapter or name.partition("_")[0]
    header = Header(
        harness=name,
        version=run.about.get("version") or load.load_all()[adapter].tested[0],
        adapter=adapter,
        dialect=run.exchanges[0].dialect,
        model=run.exchanges[0].turn["model"],
        task=asked,
        recorded=_RECORDED.format(engine=run.about.get("engine", "vLLM 0.32 with a tiny model")),
        replaced=_REPLACED,
        expected=_expected(run),
        left_out=dict(sorted(run.others.items())),
    )
    recording = Recording(header, calls)
    _verify([call.body for call in calls], sanitiser)
    path = out / f"{name}-{header.version}.jsonl"
    corpus_format.write(recording, path)
    if corpus_format.read(path) != recording:
        raise MakeError(f"{path} does not read as it was written")
    return path


def _said(run: Run) -> list[str]:
    """Every text that the model emitted: its thoughts and texts, and the strings in its calls."""
    found = []
    for exchange in run.exchanges:
        served = exchange.turn["served"]
        found += [served["content"] or "", served["reasoning"] or ""]
        for call in served["tool_calls"]:
            found.append(call["arguments"])
            try:
                found += strings_in(json.loads(call["arguments"]))
            except ValueError:
                continue
    return found


def _call(at: int, run: Run, body: dict[str, Any], sanitiser: Sanitiser) -> Call:
    exchange = run.exchanges[at - 1]
    before = _before(at, run)
    implied = {number for one in before for number in _before(one, run)}
    turn = exchange.turn
    return Call(
        call=at,
        after=[number for number in before if number not in implied],
        method=exchange.call["method"],
        path=exchange.path,
        headers={name.lower(): sanitiser.header(value) for name, value in exchange.call["request_headers"] if name.lower() in _HEADERS},
        body=body,
        stream=streams(exchange.call),
        ended="left" if exchange.left else "whole",
        said=_pieces(exchange) if exchange.left else exchange.said,
        served=exchange.reply.served,
        expected={"match": turn["match"], "reason": turn["reason"], "forgiven": turn["forgiven"]},
    )


def _before(at: int, run: Run) -> list[int]:
    """The calls that had ended when this one arrived."""
    return [number for number, other in enumerate(run.exchanges, 1) if other.ended <= run.exchanges[at - 1].began]


def _pieces(exchange: Exchange) -> list[str]:
    """The text delivered to a harness that left, split where the events ended that delivered it."""
    text, body = exchange.said, exchange.call["response_body"].replace("\r\n", "\n")
    opened = len("<think>") if text.startswith("<think>") else 0
    answer = text.find("</think>") + len("</think>") if "</think>" in text else len(text)
    cuts, events = set(), body.split("\n\n")[:-1]
    for count in range(1, len(events) + 1):
        delivered = read_reply(exchange.dialect, "\n\n".join([*events[:count], ""]), stream=True)
        cuts.add(answer + len(delivered.content) if delivered.content else opened + len(delivered.reasoning) if delivered.reasoning else 0)
    return [text[start:end] for start, end in pairwise(sorted({0, *cuts, len(text)}))]


def _expected(run: Run) -> dict[str, Any]:
    """The expected result of the session: its sequences, by the calls in each."""
    numbers = {exchange.turn["turn"]: at for at, exchange in enumerate(run.exchanges, 1)}
    sequences = [
        {"start": one["start"], "reason": one["reason"], "calls": [numbers[turn["turn"]] for turn in one["turns"]]}
        for one in run.exported["sequences"]
    ]
    incidents = sorted(incident["kind"] for incident in run.exported["incidents"])
    return {"complete": run.exported["complete"], "incidents": incidents, "sequences": sorted(sequences, key=lambda one: one["calls"])}


def _verify(bodies: list[dict[str, Any]], sanitiser: Sanitiser) -> None:
    """Checks that no replaced text is still readable, in a run of significant length."""
    texts = set(strings_in(bodies))
    left = {text[at : at + RUN] for text in texts for at in range(len(text) - RUN + 1)}
    for original in sanitiser.originals:
        for at in range(len(original) - RUN + 1):
            run = original[at : at + RUN]
            if run in left and sum(map(str.isalpha, run)) >= RUN / 2:
                raise MakeError(f"still readable: {run!r}")


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("harness", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    failed = False
    for folder in sorted(path.parent for path in options.runs.glob("*/export.json")):
        name = folder.name.removesuffix("-proxied")
        if options.harness and name not in options.harness:
            continue
        try:
            path = make(name, folder, options.out)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB, {sum(1 for _ in path.open(encoding='utf-8'))} lines")
        except MakeError as why:
            failed = True
            print(f"{name}: {why}")
    sys.exit(failed)


if __name__ == "__main__":
    main()

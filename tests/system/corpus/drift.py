"""Measures the drift of real harnesses: replays the corpus, and measures it as `tokencache drift` does.

    python -m tests.system.corpus.drift [--out docs/images/drift.svg] [--doc docs/drift.md] [--exports FOLDER] [--samples FILE]

Every recorded session runs again through the proxy, in front of the simulated engine with Qwen3's own vocabulary and chat template (from
`../shared`; without them, with the simulated ones). What the harness makes of each reply, and what the template makes of that, is as in
reality. The model's text is scripted, in the tokens that the tokenizer would choose, so nothing counts as retokenized that a sampler
might have sampled otherwise. The script is meant to be hard: unusual blanks and spacing in arguments, which every template rewrites. So
everything is replayed a second time `tidily`, with text as Qwen3's template itself would write it; the picture shows that one, because
what remains is due to the harness and the template. Last, each kind of template is tested with thinking that is sent back unchanged.
"""

import argparse
import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from tokenizers import AddedToken

from tests.engine.template.shapes import SHAPES, TOOLS, ask
from tests.engine.template.template_lab import KINDS, Kind, Lab, own_stop, qwen_backend, source, speech
from tests.proxy.kit import proxied
from tests.system.corpus.format import Recording, read
from tests.system.corpus.replay import CONTEXT, SESSION, _prepare, _Session
from tokencache.api import routes
from tokencache.commands.drift import print_rates, share
from tokencache.commands.drift_plot import draw
from tokencache.core import ids
from tokencache.core.drift import RETOKENIZED, TEMPLATE, Site, differences
from tokencache.core.splice import join, junction
from tokencache.engine.template.learned import LearnedTemplate
from tokencache.engine.template.tails import Tails
from tokencache.testing import SimulatedEngine, build_tokenizer
from tokencache.testing.tokenizer import MARKUP_TOKENS, SimTokenizer
from tokencache.trajectories.drift_rates import DriftRates, drift_rates, total
from tokencache.trajectories.values import Trajectory

CORPUS = Path(__file__).parent
_PAIRS = [f"{kind}_{side}" for kind in ("object_ref", "box", "quad", "vision") for side in ("start", "end")]
_FIM = ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
ADDED = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", *_PAIRS, "vision_pad", "image_pad", "video_pad")]
PLAIN = [*MARKUP_TOKENS[:2], *(f"<|{name}|>" for name in _FIM), *MARKUP_TOKENS[2:]]
"""Qwen3's added tokens in the order of their ids, from 151643 on (Qwen/Qwen3-0.6B, tokenizer_config.json)."""


def qwen3() -> SimTokenizer | None:
    """Qwen3's tokenizer and template; `None` if they are missing."""
    backend, template = qwen_backend(), source(KINDS["Qwen3"], shared=True)
    if backend is None or template is None:
        return None
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ADDED])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in PLAIN])
    return SimTokenizer(backend, template)


def tidied(said: str) -> str:
    """A reply with its blanks and calls as Qwen3's template writes them; a call that is not a JSON object is not changed."""

    def written(call: re.Match[str]) -> str:
        try:
            value = json.loads(call[1])
            text = json.dumps({"name": value["name"], "arguments": value["arguments"]}, ensure_ascii=False)
            text.encode()
        except (ValueError, KeyError, TypeError):
            return call[0]
        return f"<tool_call>\n{text}\n</tool_call>"

    said = re.sub(r"<tool_call>\s*(.*?)\s*</tool_call>", written, said, flags=re.DOTALL)
    said = re.sub(r"^\s*<think>\s*(.*?)\s*</think>\s*", "<think>\n\\1\n</think>\n\n", said, count=1, flags=re.DOTALL)
    return re.sub(r"(?<=\S)\s*(?=<tool_call>)(?<!</think>\n\n)", "\n", said).rstrip()


def tidy(recording: Recording) -> None:
    """Makes the model emit everything tidily; harnesses that echo its text and thinking unchanged echo that."""
    names: dict[str, str] = {}
    for call in recording.calls:
        body = json.dumps(call.body)
        for old, new in names.items():
            body = body.replace(old, new)
        call.body = json.loads(body)
        if isinstance(call.said, str):
            before, call.said = _members(call.said), tidied(call.said)
            names |= {json.dumps(old): json.dumps(new) for old, new in zip(before, _members(call.said), strict=True) if old != new}


def _members(said: str) -> tuple[str, str]:
    """Thinking and text of a reply as a stream delivers them, including blanks."""
    thought, closed, rest = said.partition("</think>")
    return (thought.removeprefix("<think>") if closed else "", (rest if closed else said).partition("<tool_call>")[0])


async def replayed(recording: Recording, tokenizer: SimTokenizer) -> dict[str, Any]:
    """Replays a session; returns its trajectory, measured at every turn."""
    engine = SimulatedEngine(model=recording.header.model, max_model_len=CONTEXT, drift=0.0, seed=11)
    engine.tokenizer = engine.replies.tokenizer = tokenizer
    _prepare(engine, recording.calls)
    async with proxied(engine) as rig:
        await _Session(recording, rig).run()
        return await rig.get(f"/tokencache/v1/sessions/{SESSION}/trajectories?drift=turns")


async def faithful(kind: Kind) -> str:
    """What a template makes of thinking and text that are sent back unchanged, with a new question: the tokens removed and added."""
    shape, lab = SHAPES["text with thinking → user"], Lab.of(kind, shared=source(kind, shared=True) is not None)
    stops, at = await lab.found_stops(kind.stops), len(shape.history)
    prompt = lab.words.encode(lab.text(shape.history[:-1], TOOLS, generation=True))
    said = lab.words.encode(speech(kind, shape.history[-1], lab.words.decode(prompt)))
    reply = ids.pack([*prompt, *said, lab.words.id_of(own_stop(kind, shape.history[-1]))])
    tail = await Tails(LearnedTemplate(lab, stops)).tail(ask(shape.messages, at, at + len(shape.new), tools=True))
    spliced = join(reply, tail, junction(reply, tail, stops))
    return _cell(differences(spliced, ids.pack(lab.words.encode(lab.text(shape.messages, TOOLS, generation=True)))))


def _cell(sites: list[Site]) -> str:
    gone, come = sum(site.end - site.start for site in sites), sum(len(site.rendered) for site in sites)
    return f"-{gone} +{come}" if sites else "same"


def sampled(path: Path, tokenizer: SimTokenizer) -> list[str]:
    """What tokenizing again changes of what a real model sampled: of every `generation_token_ids` in a JSON file."""
    told = []

    def walk(value: Any) -> None:
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(inner)
        if isinstance(value, dict) and value.get("generation_token_ids"):
            said = value["generation_token_ids"]
            sites = differences(ids.pack(said), ids.pack(tokenizer.encode(tokenizer.decode(said))))
            line = f"{len(said)} sampled tokens: {len(sites)} sites, {sum(site.end - site.start for site in sites)} tokens"
            if line not in told:
                told.append(line)

    walk(json.loads(path.read_text(encoding="utf-8")))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="draw the figures to this file")
    parser.add_argument("--doc", type=Path, help="write the tables into this page, between its marks")
    parser.add_argument("--exports", type=Path, help="write the measured trajectories to this folder")
    parser.add_argument("--samples", type=Path, help="a JSON file with token ids that a real Qwen3 sampled")
    given = parser.parse_args()
    routes.DRIFT_TIMEOUT = 600.0
    tokenizer, console = qwen3(), Console(width=140)
    console.print(f"tokenizer and template: {'Qwen3' if tokenizer is not None else 'simulated'}")
    for tidily in (False, True):
        rows = drift_rates(measured(tokenizer or build_tokenizer(), given.exports, tidily=tidily))
        console.print(f"\n{'written tidily' if tidily else 'as recorded'}", style="bold")
        print_rates(console, rows)
    if given.out is not None:
        draw(rows, given.out)
    told = {
        "rates": rates_table(rows),
        "templates": "".join(f"| {kind.name} | {asyncio.run(faithful(kind))} |\n" for kind in KINDS.values()),
    }
    console.print("\n| template | tokens that go and come |", told["templates"], sep="\n", markup=False)
    if given.doc is not None:
        page = given.doc.read_text(encoding="utf-8")
        for name, table in told.items():
            head, rest = page.split(f"<!-- {name} -->\n")
            page = f"{head}<!-- {name} -->\n{table}<!-- /{name} -->{rest.split(f'<!-- /{name} -->')[1]}"
        given.doc.write_text(page, encoding="utf-8")
    if given.samples is not None and tokenizer is not None:
        console.print(*sampled(given.samples, tokenizer), sep="\n")


def rates_table(rows: list[DriftRates]) -> str:
    """The rows of the table in docs/drift.md; the page explains what the template or the tokenizer did."""
    lines = []
    for row in [*rows, total(rows)]:
        own = [f"{name} {share(one.turns, row.measured)}" for name, one in row.causes.items() if name not in {TEMPLATE, RETOKENIZED}]
        broken = row.text_only_sequences - row.whole_sequences
        cells = [row.harness, f"{row.measured}", f"{broken} of {row.continuing}", f"{row.whole_sequences} → {row.text_only_sequences}"]
        cells += [f"{row.trainable_tokens_lost:,} of {row.trainable_tokens:,} ({share(row.trainable_tokens_lost, row.trainable_tokens)})"]
        lines.append(f"| {' | '.join([*cells, ', '.join(own) or 'nothing'])} |\n")
    return "".join(lines)


def measured(tokenizer: SimTokenizer, exports: Path | None, *, tidily: bool) -> Iterator[Trajectory]:
    """Replays the whole corpus; each trajectory under the name of its program."""
    for path in sorted(CORPUS.glob("*.jsonl")):
        recording = read(path)
        if tidily:
            tidy(recording)
        exported = asyncio.run(replayed(recording, tokenizer))
        if exports is not None:
            folder = exports / ("tidied" if tidily else "recorded")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{path.stem}.json").write_text(json.dumps(exported), encoding="utf-8")
        trajectory = msgspec.convert(exported, Trajectory)
        lines = [msgspec.structs.replace(line, turns=_as(line.turns, recording.header.harness)) for line in trajectory.sequences]
        yield msgspec.structs.replace(trajectory, sequences=lines)


def _as(turns: Any, harness: str) -> Any:
    """Turns under the program's own name (runs with a structure count as its runs, too); their model is the one scripted model."""
    return [msgspec.structs.replace(turn, harness=harness.partition("_")[0], model="") for turn in turns]


if __name__ == "__main__":
    main()

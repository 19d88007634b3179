"""The demo end to end: what it reports of a proxy that works, of one that does not splice, and of one that lies."""

import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from tokencache.cli import app
from tokencache.demo import run, run_demo
from tokencache.demo.episodes import script
from tokencache.proxy.plan import Plan
from tokencache.proxy.planner import Planner
from tokencache.testing import SimulatedEngine
from tokencache.trajectories.formats import native

ROOT = Path(__file__).parents[2]
ROLLOUTS, TURNS = 16, 8
FIGURES = ["rollouts", "turns", "contiguous_turns", "drifted_tokens", "sequences", "trainable_tokens"]


async def play(tmp_path, *, rollouts=ROLLOUTS, turns=TURNS, upstream=None, width=80):
    console = Console(width=width, record=True, color_system=None, quiet=False, file=(tmp_path / "out.txt").open("w"))
    where = tmp_path / "demo.json"
    good = await run_demo(rollouts=rollouts, turns=turns, upstream=upstream, model="", json_file=where, console=console)
    return good, json.loads(where.read_text()) if where.exists() else None, console.export_text()


async def test_the_proxy_keeps_every_rollout_in_one_piece(tmp_path):
    good, figures, said = await play(tmp_path)
    assert good
    assert list(figures) == ["direct", "proxied", "verified_by_engine"]
    assert list(figures["direct"]) == list(figures["proxied"]) == FIGURES
    assert all(type(value) is int for side in ("direct", "proxied") for value in figures[side].values())
    assert figures["verified_by_engine"] is True
    direct, proxied = figures["direct"], figures["proxied"]
    assert direct["rollouts"] == proxied["rollouts"] == proxied["sequences"] == ROLLOUTS
    assert direct["turns"] == proxied["turns"] == proxied["contiguous_turns"] == ROLLOUTS * TURNS
    assert proxied["drifted_tokens"] == 0
    assert direct["contiguous_turns"] == ROLLOUTS, "directly, only the first turns are contiguous"
    assert direct["sequences"] == ROLLOUTS * TURNS
    assert direct["drifted_tokens"] > 3000
    assert proxied["trainable_tokens"] > 5 * direct["trainable_tokens"]
    assert "Verified by the engine" in said
    readme = (ROOT / "README.md").read_text()
    for name in ("drifted_tokens", "sequences", "trainable_tokens"):
        assert f"| {direct[name]:,} | {proxied[name]:,} |" in readme


async def test_its_figures_do_not_depend_on_the_order_of_the_calls(tmp_path, monkeypatch):
    _, together, _ = await play(tmp_path, rollouts=4)
    monkeypatch.setattr(run, "_AT_ONCE", 1)
    _, in_turn, _ = await play(tmp_path, rollouts=4)
    assert in_turn == together


@pytest.mark.parametrize("width", [80, 120])
async def test_it_can_be_read_without_colour(tmp_path, width):
    _, _, said = await play(tmp_path, rollouts=1, turns=2, width=width)
    assert "\x1b" not in said
    assert max(map(cell_len, said.splitlines())) <= width
    rows = re.findall(r"^sampled  (.*)\nread as  (.*)$", said, re.MULTILINE)
    assert len(rows) >= 2
    sampled, reread = ("".join(row[n] for row in rows) for n in (0, 1))
    assert "<think>" in sampled
    assert "<think>" not in reread
    assert "10│" not in sampled, "the policy said 10.0"
    assert sampled.count("│") > reread.count("│"), "a policy's tokens are no canonical ones"


async def test_a_long_rollout_goes_through_its_job_again(tmp_path):
    good, figures, _ = await play(tmp_path, rollouts=3, turns=12)
    assert good
    assert figures["proxied"]["contiguous_turns"] == figures["proxied"]["turns"] == 36


async def test_a_proxy_that_does_not_splice_is_found_out(tmp_path, monkeypatch):
    async def never(*_args, **_kwargs):
        return Plan(match="plain", reason="broken")

    monkeypatch.setattr(Planner, "_plan", never)
    good, figures, said = await play(tmp_path, rollouts=3)
    assert not good
    assert figures["proxied"]["contiguous_turns"] == 3
    assert figures["proxied"]["sequences"] == 24
    assert figures["verified_by_engine"] is True, "what was recorded is still what the engine did"
    assert "Verified" in said


def wrong_logprob(exported):
    exported["logprobs"][-1] -= 1e-6


def wrong_completion(exported):
    exported["token_ids"][-2] ^= 1


def wrong_prompt(exported):
    exported["token_ids"][0] ^= 1


def wrong_mask(exported):
    exported["loss_mask"][0] = 1


def missing_turn(exported):
    del exported["turns"][2]


@pytest.mark.parametrize("lie", [wrong_logprob, wrong_completion, wrong_prompt, wrong_mask, missing_turn])
async def test_a_proxy_with_wrong_records_is_detected(tmp_path, monkeypatch, lie):
    truth = native.sequence_object

    def liar(*given):
        exported = truth(*given)
        lie(exported)
        return exported

    monkeypatch.setattr(native, "sequence_object", liar)
    good, figures, said = await play(tmp_path, rollouts=1, turns=4)
    assert not good
    assert figures["verified_by_engine"] is False
    assert "NOT verified" in said


async def test_an_engine_without_ground_truth_is_tapped(tmp_path):
    engine = SimulatedEngine(episodes=script(TURNS))
    async with engine.serve() as url:
        good, figures, said = await play(tmp_path, upstream=url + "/v1")
    assert good
    assert figures["verified_by_engine"] is True
    assert figures["direct"]["contiguous_turns"] == ROLLOUTS
    assert figures["proxied"]["contiguous_turns"] == figures["proxied"]["turns"] == ROLLOUTS * TURNS
    assert figures["proxied"]["trainable_tokens"] == sum(
        len(entry.completion_ids) for entry in engine.ground_truth if (entry.session or "").startswith("rollout-")
    )
    assert "between proxy and engine" in " ".join(said.split())


async def test_an_engine_that_ignores_ids_is_named(tmp_path):
    async with SimulatedEngine(episodes=script(3), honours_ids=False).serve() as url:
        good, figures, said = await play(tmp_path, rollouts=2, turns=3, upstream=url)
    assert good, "what was recorded is true, and the engine is not the proxy's fault"
    assert figures["proxied"]["contiguous_turns"] == 2
    assert "could only record" in said


async def test_no_engine_no_demo(tmp_path, unused_tcp_port):
    good, figures, said = await play(tmp_path, upstream=f"http://127.0.0.1:{unused_tcp_port}")
    assert not good
    assert figures is None
    assert "no model at" in said


async def test_a_model_that_is_not_served(tmp_path):
    console = Console(record=True, file=(tmp_path / "out.txt").open("w"))
    async with SimulatedEngine().serve() as url:
        assert not await run_demo(rollouts=1, turns=2, upstream=url, model="other", json_file=None, console=console)
    assert "serves sim, not other" in console.export_text()


def test_from_the_command_line(tmp_path):
    where = tmp_path / "demo.json"
    result = CliRunner().invoke(app, ["demo", "--rollouts", "2", "--turns", "2", "--json", str(where)])
    assert result.exit_code == 0, result.output
    assert json.loads(where.read_text())["verified_by_engine"] is True

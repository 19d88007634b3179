"""`tokencache drift` makes figures, tables and a picture from exports."""

import asyncio
import json
import sys

import msgspec
import pytest
from typer.testing import CliRunner

from tests.proxy.kit import TOOLS, echo, proxied, results, user
from tokencache.cli import app
from tokencache.trajectories.drift_rates import drift_rates, total
from tokencache.trajectories.values import Trajectory


def run(*arguments):
    done = CliRunner().invoke(app, ["drift", *map(str, arguments)], env={"COLUMNS": "100"})
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Two sessions of a harness and one without, measured at every turn; one of them also as exported by default."""

    async def made():
        async with proxied() as rig:
            for session, harness in (("a", "codex"), ("b", "codex"), ("c", "")):
                messages = [user("EPISODE:demo")]
                for _ in range(3):
                    path = f"/s/{session}{f'/h/{harness}' if harness else ''}/v1/chat/completions"
                    body = {"model": "sim", "messages": messages, "tools": TOOLS}
                    async with rig.http.post(rig.url + path, json=body) as answer:
                        assert answer.status == 200, await answer.text()
                        said = (await answer.json())["choices"][0]["message"]
                    messages += [echo(said), *results(said)]
            await rig.post("d", messages=[user("EPISODE:demo")])
            whole = {name: await rig.get(f"/tokencache/v1/sessions/{name}/trajectories?drift=turns") for name in "abcd"}
            return whole, await rig.exported("a"), await rig.get("/tokencache/v1/sessions/a/trajectories?drift=off")

    folder = tmp_path_factory.mktemp("exports")
    whole, default, off = asyncio.run(made())
    (folder / "all").mkdir()
    (folder / "all" / "ab.jsonl").write_text("".join(json.dumps(whole[name]) + "\n" for name in "ab"))
    (folder / "all" / "c.json").write_text(json.dumps(whole["c"]))
    (folder / "one-turn.json").write_text(json.dumps(whole["d"]))
    (folder / "default.jsonl").write_text(json.dumps(default) + "\n")
    (folder / "off.jsonl").write_text(json.dumps(off) + "\n")
    return folder


def figures_of(*paths):
    code, output = run(*paths, "--json")
    assert code == 0, output
    return json.loads(output)


def test_a_row_for_each_harness_and_model_and_one_for_all(exports):
    report = figures_of(exports / "all")
    assert [(row["harness"], row["model"], row["sessions"], row["measured"], row["drifted"]) for row in report["rates"]] == [
        ("", "sim", 1, 2, 2),
        ("codex", "sim", 2, 4, 4),
    ]
    assert (report["total"]["sessions"], report["total"]["measured"], report["total"]["drifted"]) == (3, 6, 6)


def test_the_figures_are_those_of_the_rollouts_themselves(exports):
    report = figures_of(exports / "all")["total"]
    lines = [*(exports / "all" / "ab.jsonl").read_text().splitlines(), (exports / "all" / "c.json").read_text()]
    drift = [json.loads(line)["figures"]["drift"] for line in lines]
    assert report["drifted_tokens"] == sum(one["tokens"] for one in drift)
    assert report["text_only_sequences"] == sum(one["text_only_sequences"] for one in drift)
    assert report["trainable_tokens_lost"] == sum(one["trainable_tokens_lost"] for one in drift)
    for cause in {cause for one in drift for cause in one["causes"]}:
        assert report["causes"][cause]["sites"] == sum(one["causes"].get(cause, 0) for one in drift)


def test_the_tables_can_be_read_without_colour(exports):
    code, output = run(exports / "all")
    assert code == 0
    assert "\x1b" not in output
    for words in ("codex, sim", "(no adapter), sim", "reasoning-dropped", "with text alone", "100.0 %"):
        assert words in output
    assert "Export with" not in output


def test_names_in_a_file_neither_control_the_terminal_nor_are_markup(exports, tmp_path):
    text = json.dumps(json.loads((exports / "default.jsonl").read_text()))
    (tmp_path / "nasty.json").write_text(
        text.replace('"sim"', '"m\\u001b[31m[red]\\u202ex"').replace('"reasoning-dropped"', '"\\u001b[red]"')
    )
    code, output = run(tmp_path / "nasty.json")
    assert code == 0
    assert "m [31m[red] x" in output
    assert " [red]" in output.partition("Causes")[2].replace("m [31m[red]", "")
    assert output.replace("\n", "").isprintable()
    assert run(tmp_path / "nasty.json", "--json")[1].replace("\n", "").isprintable()


def test_partial_measurements_are_reported_as_such(exports):
    code, output = run(exports / "default.jsonl")
    assert code == 0
    assert "Of 1 sequences 0 were measured at every turn" in output
    (row,) = figures_of(exports / "default.jsonl")["rates"]
    assert (row["could_drift"], row["measured"], row["whole_sequences"], row["text_only_sequences"]) == (2, 1, 0, 0)


def test_without_measurements_the_report_says_how_to_measure(exports):
    code, output = run(exports / "off.jsonl")
    assert code == 1
    assert "--drift turns" in output


@pytest.mark.parametrize(
    ("text", "words"),
    [("{not json\n", "line 1: not valid JSON"), ('{"session": "a"}\n', "not a native trajectory"), ("", "contains no turn")],
)
def test_a_file_that_is_not_an_export_is_named(tmp_path, text, words):
    (tmp_path / "x.jsonl").write_text(text)
    code, output = run(tmp_path / "x.jsonl")
    assert code == 1
    assert "x.jsonl" in output
    assert words in output


def test_no_file_and_no_exports(tmp_path):
    assert "cannot be read" in run(tmp_path / "none.jsonl")[1]
    assert "without exports" in run(tmp_path)[1]


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_picture_has_a_transparent_background(exports, tmp_path, ending):
    path = tmp_path / f"drift.{ending}"
    code, output = run(exports / "all", "--plot", path, "--title", "Drift")
    assert code == 0, output
    if ending == "png":
        from matplotlib.image import imread

        assert imread(path)[0, 0, 3] == 0
    else:
        assert "codex" in path.read_text()


def test_there_is_no_picture_of_nothing(exports, tmp_path):
    code, output = run(exports / "one-turn.json", "--plot", tmp_path / "x.svg")
    assert (code, [*tmp_path.iterdir()]) == (1, [])
    assert "there is nothing to draw" in output


def test_without_matplotlib_the_extra_is_named(exports, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokencache.commands.drift_plot", None)
    code, output = run(exports / "all", "--plot", tmp_path / "x.svg")
    assert code == 1
    assert "pip install '.[plot]'" in output


def test_an_unknown_picture_format_is_an_error(exports, tmp_path):
    code, output = run(exports / "all", "--plot", tmp_path / "x.docx")
    assert code == 1
    assert "docx" in output


async def test_sessions_of_a_proxy_are_measured():
    async with proxied() as rig:
        messages = [user("EPISODE:talk")]
        for _ in range(2):
            said = await rig.say("live", messages)
            messages += [echo(said), *results(said)]
        code, output = await asyncio.to_thread(run, "live", "--proxy", rig.url, "--json")
        assert code == 0, output
        assert json.loads(output)["total"]["measured"] == 1
        code, output = await asyncio.to_thread(run, "none", "--proxy", rig.url)
        assert code == 1
        assert "no session" in output


def trajectory(*turns):
    counts = dict.fromkeys(("calls", "turns", "sequences", "trainable_tokens", "masked_tokens", "untrainable_tokens"), 0)
    figures = counts | {name: {} for name in ("matches", "forgiven", "incidents")}
    line = {"id": "q", "token_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 0, 0, 1], "logprobs": [0.0] * 5, "turns": list(turns)}
    line |= {"start": "root", "weight": 1}
    return msgspec.convert({"session": "s", "complete": True, "sequences": [line], "figures": figures}, Trajectory)


def test_models_can_be_renamed_and_rows_summed():
    none = {"rendered": 1, "tokens": 0, "sites": []}
    some = {"rendered": 3, "tokens": 1, "sites": [{"start": 1, "end": 2, "rendered": [], "cause": "template", "turn": "t1"}]}
    first = {"turn": "t1", "prompt": (0, 1), "completion": (1, 2), "match": "root", "model": "m", "drift": none}
    second = {"turn": "t2", "prompt": (2, 4), "completion": (4, 5), "match": "continue", "model": "m", "drift": some}
    (row,) = drift_rates([trajectory(first, second), trajectory(first, second)], {"m": "Qwen3"})
    assert (row.model, row.sessions, row.could_drift, row.measured, row.drifted) == ("Qwen3", 2, 2, 2, 2)
    assert (row.prompt_tokens, row.drifted_tokens, row.causes["template"].turns) == (8, 2, 2)
    assert (row.text_only_sequences, row.trainable_tokens, row.trainable_tokens_lost) == (4, 4, 2)
    assert total([row]).trainable_tokens_lost == 2

"""The lint of the documentation finds a broken example of each kind, and says where it is."""

import re

import pytest

from tests.docs import lint, reference

BROKEN = [
    (lint.links, "README.md", ("", "[x](missing.md)\n"), "missing.md leads nowhere"),
    (lint.links, "docs/topologies/machines.md", ("", "[x](../../README.md)\n"), "README.md is not part of the site"),
    (lint.links, "docs/concepts.md", ("", "[x](api.md#missing)\n"), "api.md#missing names no heading"),
    (lint.links, "docs/concepts.md", ("", "[x](#missing)\n"), "#missing names no heading"),
    (lint.paths_in_code_spans, "bench/README.md", ("", "`tests/missing.py:test`\n"), "`tests/missing.py` does not exist"),
    (lint.paths_in_code_spans, "docs/concepts.md", ("", "`core/missing.py`\n"), "`core/missing.py` does not exist"),
    (lint.pages_that_code_names, "tokencache/config.py", ("", "# docs/missing.md\n"), "docs/missing.md does not exist"),
    (lint.pages_that_code_names, "mkdocs.yml", ("", "# harness_adapters/MISSING.md\n"), "harness_adapters/MISSING.md does not exist"),
    (lint.python_names, "docs/concepts.md", ("", "tokencache.missing\n"), "tokencache.missing does not exist"),
    (lint.python_names, "docs/concepts.md", ("", "`tokencache.integrations.verl.Missing`\n"), "verl.Missing does not exist"),
    (lint.generated_parts, "docs/openapi.json", ("{", "{{"), "run .venv/bin/python -m tests.docs.reference"),
    (lint.generated_parts, "docs/metrics.md", ("<!-- end -->", "more\n<!-- end -->"), "this generated part is not up to date"),
    (
        lint.generated_parts,
        "docs/concepts.md",
        ("", "<!-- generated: missing -->\n<!-- end -->\n"),
        "the part missing is on another page",
    ),
    (lint.generated_parts, "docs/concepts.md", ("", "<!-- generated: marks -->\n<!-- end -->\n"), "the part marks is on another page"),
    (lint.generated_parts, "docs/metrics.md", ("<!-- generated: metrics -->", ""), "the part metrics is on no page"),
    (lint.registries, "docs/formats.md", ("\n| `", "\n| `missing` `"), "format `missing` does not exist"),
    (lint.registries, "docs/drivers.md", ("\n| `vllm` ", "\n| vllm "), "driver `vllm` is missing"),
    (lint.adapters, "docs/adapters.md", ("`mutations`", "mutations"), "field `mutations` of an adapter is not explained"),
    (lint.adapters, "docs/adapters.md", ("{session}", "SESSION"), "placeholder {session} is not explained"),
    (lint.commands, "README.md", ("", "    tokencache missing\n"), "tokencache has no command missing"),
    (lint.commands, "docs/concepts.md", ("", "    .venv/bin/tokencache serve \\\n        --missing\n"), "No such option: --missing"),
    (lint.commands, "docs/concepts.md", ("", "    tokencache serve --workers 2\n"), "workers cannot keep sessions in memory"),
    (lint.commands, "docs/topologies/sidecar.md", ("    tokencache serve", "    serve"), "shows no `tokencache serve`"),
    (lint.exposed, "docs/operations.md", ("`tokencache_turns_total{match, ", "`tokencache_turns_total{"), "match, reason}` is missing"),
    (lint.exposed, "docs/deploy.md", ("", "`tokencache_missing_total`\n"), "metric `tokencache_missing_total` does not exist"),
    (lint.alerts, "docs/operations.md", ("| `TokencacheHole` |", "| TokencacheHoles |"), "alert `TokencacheHole` is missing"),
    (lint.log_lines, "docs/operations.md", ("| `stopping` |", "| `halting` |"), "no log line has the words `halting`"),
    (lint.quoted_messages, "docs/troubleshooting.md", ("", '"no such message"\n'), 'no message has the words "no such message"'),
    (lint.names_of_kinds, "docs/concepts.md", ("", "incident `missing`\n"), "incident `missing` does not exist"),
    (lint.names_of_kinds, "docs/concepts.md", ("", "reasons `missing`\n"), "reason `missing` does not exist"),
    (lint.names_of_kinds, "docs/concepts.md", ("", "mark `missing`\n"), "mark `missing` does not exist"),
    (lint.uncounted_incidents, "docs/operations.md", ("\n`call-open`, `torn", "\n`no-logprobs`, `torn"), "`call-open` is missing"),
    (lint.uncounted_incidents, "docs/operations.md", ("counted in", "part of"), "are not named"),
    (lint.generated_parts, "docs/client.md", ("\nimport ", "\nimport os, "), "this generated part is not up to date"),
    (
        lint.examples,
        "docs/integrations/verl.md",
        ("    - name: ", "    - called: "),
        "does not show examples/integrations/verl_",
    ),
    (lint.examples, "examples/grpo_loop.py", ("\n", "\n" * 30), "has more than 62 lines"),
    (lint.too_long, "docs/concepts.md", ("", "word " * (lint.MOST_WORDS + 1)), "(MOST_WORDS in tests/docs/lint.py): shorten one by"),
]


@pytest.fixture(scope="module")
def files():
    return lint.read()


def replaced(files, name, old, new):
    assert old in files[name], f"{name} has changed: mend this example"
    return files | {name: files[name].replace(old, new) if old else new + files[name]}


@pytest.mark.parametrize(("check", "name", "change", "what"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_example_is_found(files, check, name, change, what):
    problems = list(check(replaced(files, name, *change)))
    assert any(what in text and "\n" not in text for _, _, text in problems), problems


def test_each_check_has_a_broken_example():
    assert {check for check, *_ in BROKEN} == set(lint.CHECKS)


def test_all_that_is_wrong_is_listed_with_its_place(files, capsys):
    broken = replaced(files, "docs/concepts.md", "\n## ", "\nmark `missing`\n[x](missing.md)\n\n## ")
    line = broken["docs/concepts.md"].partition("mark `missing`")[0].count("\n") + 1
    assert lint.main(broken) == 1
    printed = capsys.readouterr().out
    assert f"docs/concepts.md:{line}: mark `missing` does not exist: correct the name\n" in printed
    assert f"docs/concepts.md:{line + 1}: missing.md leads nowhere: correct the path\n" in printed
    assert re.search(r"^docs: [\d,]+ words in \d+ pages", printed, re.MULTILINE)


@pytest.mark.parametrize("part", ["<!-- generated: x -->\n{}\n<!-- end -->", "<!-- x y -->\n{}\n<!-- /x y -->"])
def test_words_of_generated_parts_do_not_count(part):
    text = "before\n" + part.format("many words") + "\nbetween\n" + part.format("more") + "\nafter"
    assert lint.by_people("docs/a.md", text).split() == ["before", "between", "after"]
    assert lint.by_people("docs/harnesses.md", text) == ""


def test_names_in_integrations_are_looked_up():
    assert lint.in_an_integration("tokencache.integrations.verl.TokencacheAgentLoop")
    assert lint.in_an_integration("tokencache.integrations.nemo_gym.results")
    assert not lint.in_an_integration("tokencache.integrations.missing")


def test_a_generated_part_that_differs_is_written_again():
    page = "before\n<!-- generated: metrics -->\nold\n<!-- end -->\nafter"
    assert "\nold\n" not in reference.updated(page)
    assert reference.updated(page).startswith("before\n")
    assert reference.updated(page).endswith("\nafter")

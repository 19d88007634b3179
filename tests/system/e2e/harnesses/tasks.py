"""The scripted model's replies to each harness: a task in that harness's own tools.

All do the same job, with everything in it that makes histories hard to recognise: thinking, text before a call, several calls at once,
arguments in unusual spacing and key order, escapes, numbers such as `10000.0`, white space around text, and calls that the harness is
known to rewrite (`habits`). Then the user asks for more, in a new process if the harness can resume, and the job ends with two files in
the work directory.

The arguments of a call are JSON as a model might write it, not as a library would: therefore they are strings here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from namespace import WORK
from rig.miniswe import SUBMIT

FIRST = "Create hello.txt in the current directory."
SECOND = "Now print it in upper case."
HELLO = "héllo wörld ☃\n"
UPPER = "HéLLO WöRLD ☃\n"


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def say(thought, text="", *calls):
    """A turn: the thought as it is between its tags, the text as it is before the calls."""
    return f"<think>{thought}</think>\n\n{text}" + "\n".join(calls)


@dataclass(frozen=True)
class Tools:
    """How a harness's model runs a command and writes a file, as text."""

    run: Callable
    """(command as a JSON string) → call, in unusual spacing and with the tool's other parameters."""
    run_plainly: Callable
    """The same in its simplest form."""
    write: Callable | None = None
    """(path as a JSON string) → call that writes `HELLO` there; None: the shell does it."""
    habits: list = field(default_factory=list)
    """Turns whose calls this harness is known to rewrite."""
    answer: str = "\n\nDone ✅ — created `hello.txt`.\n\n  "
    """The text that ends the first task."""

    def written(self, name):
        if self.write is None:
            return self.run_plainly(json.dumps(f"printf 'héllo wörld ☃\\n' > {name}", ensure_ascii=False))
        return self.write(json.dumps(f"{WORK}/{name}"))


NOTE = '"note" : "List \\u2014 caf\\u00e9 \\/ naïve"'


def tools(shell, command, *, extra=NOTE, write=None, path="path", content="content", habits=(), listed=False, **more):
    """The tools of a harness with these names and parameters; `listed` if it takes a list of commands."""
    before, commands = f"{extra},  " if extra else "", "[ {} ]" if listed else "{}"
    parameters = f'"{content}": "h\\u00e9llo wörld \\u2603\\n",\n "{path}"'
    return Tools(
        run=lambda text: call(shell, f'{{{before}"{command}" : {commands.format(text)} }}'),
        run_plainly=lambda text: call(shell, f'{{"{command}":{commands.format(text)}}}'),
        write=write and (lambda where: call(write, f"{{{parameters}: {where}}}")),
        habits=list(habits),
        **more,
    )


def job(kit):
    """All turns of the job in one harness's tools: the first task, and the second."""
    return [
        say(
            "\nThe user wants a file. First “look” around…\n\n",
            "\n\nLet me look around — naïve ☕ first.  \n\n",
            kit.run("\"ls; echo 'héllo ☃ \\u00e9'\""),
        ),
        say("\nWrite it, and list in parallel.\n", "", kit.written("hello.txt"), kit.run('"ls -1"')),
        say("\n\n", "  \n", kit.run_plainly('"cat hello.txt"')),
        *kit.habits,
        say("   ", "Checking the size, with a space behind ", kit.run('"wc -c hello.txt"')),
        say("\nAll done.\n", kit.answer),
        say("\nA follow-up request.\n", "On it.\n\tTabbed line.", kit.run_plainly('"tr a-z A-Z < hello.txt | tee upper.txt"')),
        say("\nFinish.\n", "Second answer.\n"),
    ]


def one_task(kit, *ending):
    """The job for a harness that accepts one task: both parts in one."""
    *turns, _, upper, _ = job(kit)
    return [*turns, upper, *ending]


def short_job(kit):
    """A job that leaves one file, and needs no certain directory."""
    return [
        say("\nFirst “look” around…\n\n", "\n\nLet me look — naïve ☕.  \n\n", kit.run("\"ls; echo 'héllo ☃ \\u00e9'\"")),
        say("   ", "Now the file, with a space behind ", kit.run_plainly('"echo ☃ > done.txt"')),
        say("\nAll done.\n", "\n\nDone ✅.\n\n  "),
    ]


def strictly(kit, *, final):
    """The job for a harness whose every answer must consist only of calls (`tool_choice: required`, which a grammar enforces)."""
    only = [
        [kit.run("\"ls; echo 'héllo ☃ \\u00e9'\"")],
        [kit.written("hello.txt"), kit.run('"ls -1"')],
        [kit.run_plainly('"cat hello.txt"')],
        [kit.run('"wc -c hello.txt"')],
        [final("Done \\u2705 — created `hello.txt`.")],
        [kit.run_plainly('"tr a-z A-Z < hello.txt | tee upper.txt"')],
        [final("Second answer.")],
    ]
    return [f"<think>\nStep {number} — naïve ☕…\n\n</think>" + "".join(calls) for number, calls in enumerate(only)]


TIMEOUT = '"timeout" : 10000.0,  "description" : "List \\u2014 caf\\u00e9 \\/ naïve"'
CLAUDE_HABITS = [
    say("\nh1\n", "Look.", call("Bash", f'{{"command":"cd {WORK} && ls -1","description":"x"}}')),
    say("\nh2\n", "c", call("Bash", '{"command":"echo a \\\\; echo b","timeout":"5000","run_in_background":"false"}')),
    say("\nh3\n", "c", call("Write", f'{{"content":"line with trailing   \\nsecond\\t\\n\\n","file_path":"{WORK}/a.txt"}}')),
    say("\nh4\n", "c", call("Read", f'{{"limit":"2","offset":"1","file_path":"{WORK}/a.txt"}}')),
    say("\nh5\n", "c", call("Edit", f'{{"new_string":"2nd","old_string":"second","file_path":"{WORK}/a.txt"}}')),
    say("\nh6\n", "No object.", call("Bash", "null")),
]
OPENCODE_HABITS = [
    say("\nh1\n", "Other keys.", call("bash", '{"zeta":1e2,"command":"echo big","description":"x","neg":-0.0}')),
    say(
        "\nh2\n",
        "Other names.",
        call("Bash", '{"description" : "x", "command" : "ls -1"}'),
        call("READ", f'{{"filePath":"{WORK}/hello.txt"}}'),
    ),
    say("\nh3\n", "No object.", call("bash", '["ls"]')),
]
KILO_HABITS = [*OPENCODE_HABITS, say("\nh4\n", "Unknown.", call("no_such_tool", '{ "a":1 }'))]
OPENHANDS_HABITS = [
    say("\nh1\n", "Another name.", call("bash", '{"command" : "ls -1", "timeout":null}')),
    say("\nh2\n", "c", call("str_replace_editor", f'{{"command":"view","path":"{WORK}/hello.txt","view_range":"[1, 1]"}}')),
]
QWEN_HABITS = [say("\nh1\n", "No object.", call("run_shell_command", '["ls"]'))]
HERMES_HABITS = [
    say("\nh1\n", "Other names.", call("Terminal", '{"timeout" : 60.0, "command" : "ls -1"}'), call("READ_FILE", '{"path":"hello.txt"}')),
    say(
        "\nh2\n",
        "Twice.",
        *[call(name, '{"command":"echo twice"}') for name in ("terminal", "TERMINAL", "terminal")],
        call("terminal", '{"command":"ls"}'),
    ),
]
STRANDS_HABITS = [say("\nh1\n", "Not a name.", call("run it", '{"command" : "ls -1"}'))]

KITS = {
    "claude-code": tools("Bash", "command", extra=TIMEOUT, write="Write", path="file_path", habits=CLAUDE_HABITS),
    "codex": tools("exec_command", "cmd", extra='"yield_time_ms" :  1000'),
    "hermes": tools("terminal", "command", extra='"timeout" : 60.0', write="write_file", habits=HERMES_HABITS),
    "opencode": tools("bash", "command", extra=TIMEOUT, write="write", path="filePath", habits=OPENCODE_HABITS),
    "qwen-code": tools(
        "run_shell_command", "command", extra='"is_background" : false', write="write_file", path="file_path", habits=QWEN_HABITS
    ),
    "gemini-cli": tools("run_shell_command", "command", extra='"description" : "List \\u2014"', write="write_file", path="file_path"),
    "pi": tools("bash", "command", extra='"timeout" : 60.0', write="write"),
    "kimi-code": tools("Bash", "command", extra='"timeout" : 60', write="Write"),
    "openclaw": tools("exec", "command", extra='"timeout" : 60.0', write="write"),
    "copilot": tools("bash", "command", extra='"description" : "List \\u2014"', write="create", content="file_text"),
    "kilo": tools("bash", "command", extra=TIMEOUT, write="write", path="filePath", habits=KILO_HABITS),
    "cline": tools("run_commands", "commands", listed=True, write="editor", content="new_text"),
    "continue": tools("Bash", "command", write="Write", path="filepath"),
    "droid": tools("Execute", "command", write="Create", path="file_path"),
    "mini-swe-agent": tools("bash", "command", extra=""),
    "openhands": tools("terminal", "command", extra='"is_input" : "false"', habits=OPENHANDS_HABITS),
    "openai-agents": tools("shell", "command", write="write_file"),
    "openai-agents-chat": tools("shell", "command", write="write_file"),
    "langgraph": tools("shell", "command", write="write_file"),
    "pydantic-ai": tools("shell", "command", write="write_file"),
    "smolagents": tools("shell", "command", write="write_file"),
    "crewai": tools("shell", "command", extra="", write="write_file"),
    "strands": tools("shell", "command", write="write_file", habits=STRANDS_HABITS, answer=" \n"),
    "google-adk": tools("shell", "command", write="write_file"),
    "google-adk-gemini": tools("shell", "command", write="write_file"),
    "agno": tools("shell", "command", write="write_file"),
}


def typed(keystrokes=None, *, done=False):
    """An answer of Terminus-2: no calls, a JSON object with what to type."""
    commands = [f'{{ "keystrokes": "{keystrokes}\\n" , "duration": 1.0 }}'] if keystrokes else []
    ending = ', "task_complete": true' if done else ""
    return f'{{\n "analysis": "naïve \\u2615",\n "plan": "on",\n "commands": [{", ".join(commands)}]{ending}\n}}'


TERMINUS = [
    say("\nthink ☕\n", f"\n\n{typed('ls')}  \n\n"),
    say("\nwrite\n", "Some words before.\n" + typed(r"printf 'héllo wörld ☃\\n' > hello.txt") + "\nand behind \n"),
    say("", "No JSON at all.  \n"),
    say("   ", typed("tr a-z A-Z < hello.txt | tee upper.txt")),
    say("\ndone\n", typed(done=True)),
    say("\nyes\n", typed(done=True) + "\n"),
]

STRICT = {"smolagents": lambda kit: strictly(kit, final=lambda text: call("final_answer", f'{{ "answer" : "{text}" }}'))}
"""Harnesses whose answers a grammar constrains."""

SHORT = ("claude-code", "codex", "gemini-cli")
"""Harnesses that do the short job in TRL's rollout worker: each speaks another dialect, and none speaks chat completions."""

ENDINGS = {
    "mini-swe-agent": [say("\nAll there.\n", "Done.  \n", call("bash", f'{{"command": "{SUBMIT}"}}'))],
    **{name: [say("\nAll there.\n", "Done.  \n")] for name in ("crewai", "cline", "droid")},
}
"""The last turn of harnesses that accept only one task."""


def scripts():
    """Episodes for the scripted model, by the harness's name."""
    found = {}
    for name, kit in KITS.items():
        turns = one_task(kit, *ENDINGS[name]) if name in ENDINGS else STRICT.get(name, job)(kit)
        found[name] = {"turns": turns, "side": say("\nA title is wanted.\n", "Create Hello File")}
    short = {f"{name}-short": {"turns": short_job(KITS[name]), "side": say("", "A Short Job")} for name in SHORT}
    return found | short | {"terminus-2": TERMINUS}


def prompts(name):
    """The user's prompts for this harness: the first words contain the name of the episode."""
    first = f"EPISODE:{name} {FIRST}"
    return [f"{first} {SECOND}"] if name in ENDINGS or name not in KITS else [first, SECOND]

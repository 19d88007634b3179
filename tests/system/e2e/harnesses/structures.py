"""Runs that are more than one line of calls: sub-agents, compaction, forks, interrupts.

`tasks.py` tests whether a history is recognised; this tests whether calls are assigned to the right line. The expected result follows from
a run's structure: the main agent's calls are one sequence, each sub-agent's another, and a context that the harness rebuilds (compaction)
begins one.
"""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from namespace import WORK
from programs import AGENTS, PROGRAMS, Step, claude
from tasks import call, say


@dataclass(frozen=True)
class Structure:
    """A run of a harness with its episodes, and the expected sequences: (how it begins, why, turns)."""

    harness: str
    episodes: dict
    steps: Callable
    """The run's episode → its steps."""
    sequences: list
    note: str
    none_received: list = field(default_factory=list)
    """The sequences if a harness ends before it has saved what it received: the next prompt contains nothing of that answer."""
    all_received: list = field(default_factory=list)
    """The sequences if it had received every recorded token: the next prompt extends them."""
    asked: dict = field(default_factory=dict)
    """The model's reply to a prompt that ends in these words, at any turn (`rig/scripted_model.py`)."""
    environment: dict = field(default_factory=dict)
    """What a user would set for this run."""
    sends: str = ""
    """What one of its requests must contain, so that the run shows what it is meant to show."""


def in_order(*tasks):
    """The steps of a conversation: the first task, which names the episode, and the later ones in new processes."""

    def steps(name):
        first, *others = tasks
        return PROGRAMS[name.partition("_")[0]].steps([f"EPISODE:{name} {first}", *others])

    return steps


def shell(tool, command, key="command", **others):
    return call(tool, json.dumps({**others, key: command}, ensure_ascii=False))


def agent(tool, episode, **others):
    """A call that starts a sub-agent on this episode."""
    return call(tool, json.dumps({"prompt": f"EPISODE:{episode} Look around — naïve ☕.", "description": "look around", **others}))


def looking(tool, times, key="command"):
    """A sub-agent's turns: it looks this many times, and reports."""
    looks = [say(f"\nlook {n}\n", "  Looking — ☕.\n", shell(tool, f"echo look {n}", key)) for n in range(times)]
    return [*looks, say("\nseen\n", "\n Nothing there ✅.  \n")]


def delegating(name):
    """The episodes of OpenCode, or its fork, and of the sub-agent that it sends."""
    return {
        name: [
            say("\nSomebody else can look.\n", "  Sending one ☕.\n", agent("task", f"{name}-a", subagent_type="general")),
            say("\nIt is back.\n", "", shell("bash", "ls -1", description="list")),
            say("\nDone.\n", "\nNothing found ✅.  "),
            say("\nAgain?\n", "It is as I said.\n"),
        ],
        f"{name}-a": looking("bash", 2),
    }


SESSION = str(uuid.uuid5(uuid.NAMESPACE_URL, "claude-code_fork"))
SUMMARY = say(
    "\nA summary is wanted.\n", "<analysis>short</analysis>\n<summary>\nEPISODE:claude-code_compacted made.txt was made.\n</summary>"
)
MADE = say("\nfirst\n", "Here it is ✅:  \n", shell("Bash", "echo 'héllo' > made.txt"))


def forking(name):
    """A conversation that continues twice from the same point: as a fork, and as itself."""
    resumed = ["--resume", SESSION]
    return [
        Step(claude(f"EPISODE:{name} Begin.", "--session-id", SESSION)),
        Step(claude("Try one way.", *resumed, "--fork-session")),
        Step(claude("Try the other.", *resumed)),
    ]


def interrupted(name):
    """The first process gets Ctrl-C in the middle of its answer; another one continues."""
    return [Step(claude(f"EPISODE:{name} Tell me all."), interrupt=("text_delta", 40)), Step(claude("Go on, briefly.", "--continue"))]


NOTES = json.dumps({"mcpServers": {"notes": {"command": "python3", "args": [str(AGENTS / "mcp_notes.py")]}}})


def searching(name):
    """Two tasks with the tools of an MCP server, which the model has to search for."""
    tasks = [f"EPISODE:{name} Read the plan.", "Which notes are there?"]
    return [Step(claude(task, "--mcp-config", NOTES, *more)) for task, more in zip(tasks, ([], ["--continue"]), strict=True)]


def search(tool):
    return call("ToolSearch", json.dumps({"query": f"select:{tool}", "max_results": 1}))


STRUCTURES = {
    "claude-code_agents": Structure(
        "claude-code",
        {
            "claude-code_agents": [
                say(
                    "\nTwo can look at once.\n",
                    "  Sending two ☕.\n",
                    agent("Agent", "claude-code_agents-a", subagent_type="general-purpose", run_in_background=False),
                    agent("Agent", "claude-code_agents-b", subagent_type="general-purpose", run_in_background=False),
                ),
                say("\nBoth are back.\n", "", shell("Bash", f"cd {WORK} && ls")),
                say("\nDone.\n", "\nNothing found ✅.  "),
                say("\nAgain?\n", "It is as I said.\n"),
            ],
            "claude-code_agents-a": looking("Bash", 1),
            "claude-code_agents-b": looking("Bash", 3),
        },
        in_order("Send two to look around.", "Are you sure?"),
        [("root", "", 4), ("root", "", 2), ("root", "", 4)],
        "two sub-agents at the same time, each a separate sequence",
    ),
    "claude-code_compact": Structure(
        "claude-code",
        {
            "claude-code_compact": [
                MADE,
                say("\nsecond\n", "  Reading.\n", shell("Bash", "cat made.txt")),
                say("\nthird\n", "\nThere it is — naïve ☕.\n "),
            ],
            "claude-code_compacted": [
                "the last answer before the compaction stands here",
                say("\nwhere was I\n", "Looking again.\n", shell("Bash", "wc -c made.txt")),
                say("\nend\n", "Eight bytes ✅.\n"),
            ],
        },
        in_order("Make a file.", "/compact", "How long is it?"),
        [("root", "", 3), ("branch", "", 1), ("resplice", "context-edited", 2)],
        "`/compact`: a summary of all but the last answer is requested, so that call branches off; then a sequence begins that has "
        "the last answer's exact tokens",
        asked={"an <analysis> block followed by a <summary>": SUMMARY},
    ),
    "claude-code_fork": Structure(
        "claude-code",
        {"claude-code_fork": [MADE, say("\nok\n", "Made ✅.  \n"), say("\nnext\n", " One way, or the other — ☕.\n")]},
        forking,
        [("root", "", 3), ("branch", "", 1)],
        "`--fork-session`: two continuations of one turn",
    ),
    "claude-code_interrupt": Structure(
        "claude-code",
        {"claude-code_interrupt": [say("\nall of it\n", "Word for word, as it was said. " * 800), say("\nbriefly\n", "That was it.\n")]},
        interrupted,
        [("root", "", 1), ("resplice", "interrupted", 1)],
        "Ctrl-C in mid-answer, then `--continue`: the delivered prefix is recognised, token for token; a sequence begins after it",
        none_received=[("root", "", 1), ("plain", "unrecognised-reply", 1)],
        all_received=[("root", "", 2)],
    ),
    "claude-code_search": Structure(
        "claude-code",
        {
            "claude-code_search": [
                say("\nThere may be a tool.\n", "  Searching ☕.\n", search("mcp__notes__read_note")),
                say("\nThere it is.\n", "", call("mcp__notes__read_note", '{ "name" : "plan" }')),
                say("\nAs it says.\n", "Looking first.\n", shell("Bash", "ls -1")),
                say("\nDone.\n", "\nFirst look, then write ✅.  "),
                say("\nAnother tool.\n", "", search("mcp__notes__list_notes")),
                say("\nHere.\n", "All notes:\n", call("mcp__notes__list_notes", "{}")),
                say("\nTwo.\n", "Two notes — plan, end.\n"),
            ],
        },
        searching,
        [("root", "", 1), ("resplice", "context-edited", 4), ("resplice", "context-edited", 2)],
        "tool search with an MCP server: a tool that is found changes the list of tools in the prompt, so a sequence begins with all "
        "answers' exact tokens",
        environment={"ENABLE_TOOL_SEARCH": "true"},
        sends='"type":"tool_reference"',
    ),
    "opencode_task": Structure(
        "opencode",
        delegating("opencode_task"),
        in_order("Send one to look around.", "Are you sure?"),
        [("root", "", 1), ("root", "", 4), ("root", "", 3)],
        "a sub-agent and the title call, each a separate sequence",
    ),
    "kilo_task": Structure(
        "kilo",
        delegating("kilo_task"),
        in_order("Send one to look around.", "Are you sure?"),
        [("root", "", 4), ("root", "", 3)],
        "a sub-agent, in a separate sequence",
    ),
    "copilot_agents": Structure(
        "copilot",
        {
            "copilot_agents": [
                say(
                    "\nTwo can look at once.\n",
                    "  Sending two ☕.\n",
                    agent("task", "copilot_agents-a", agent_type="general-purpose", name="first"),
                    agent("task", "copilot_agents-b", agent_type="general-purpose", name="second"),
                ),
                say("\nBoth are back.\n", "", shell("bash", "ls -1", description="list")),
                say("\nDone.\n", "\nNothing found ✅.  "),
                say("\nAgain?\n", "It is as I said.\n"),
            ],
            "copilot_agents-a": looking("bash", 1),
            "copilot_agents-b": looking("bash", 3),
        },
        in_order("Send two to look around.", "Are you sure?"),
        [("root", "", 4), ("root", "", 2), ("root", "", 4)],
        "two sub-agents at the same time, each a separate sequence",
    ),
    "copilot_odd": Structure(
        "copilot",
        {
            "copilot_odd": [
                say("\nNo object.\n", "  Odd ☕.\n", call("bash", '[ "ls" ]')),
                say("\nAgain.\n", "", shell("bash", "ls -1", description="list")),
                say("\nDone.\n", "\nNothing found ✅.  "),
                say("\nAgain?\n", "It is as I said.\n"),
            ],
        },
        in_order("Look around.", "Are you sure?"),
        [("root", "", 3), ("resplice", "context-edited", 1)],
        "a call whose arguments are a list: `--continue` leaves it out with its result, so a sequence begins with the other answers' "
        "exact tokens",
    ),
    "codex_agents": Structure(
        "codex",
        {
            "codex_agents": [
                say(
                    "\nSomebody else can look.\n",
                    "  Sending one ☕.\n",
                    call("multi_agent_v1__spawn_agent", '{"message" : "EPISODE:codex_agents-a Look around." }'),
                ),
                say(
                    "\nWait for it.\n",
                    "",
                    call("multi_agent_v1__wait_agent", '{"targets": ["{{seen:agent_id[^0-9a-f]+([0-9a-f-]{36})}}"], "timeout_ms": 600000}'),
                ),
                say("\nIt is back.\n", "", shell("exec_command", "ls -1", "cmd")),
                say("\nDone.\n", "\nNothing found ✅.  "),
                say("\nAgain?\n", "It is as I said.\n"),
            ],
            "codex_agents-a": looking("exec_command", 2, "cmd"),
        },
        in_order("Send one to look around.", "Are you sure?"),
        [("root", "", 5), ("root", "", 3)],
        "a sub-agent, in a separate sequence",
    ),
    "strands_edited": Structure(
        "strands",
        {
            "strands_edited": [
                say("\nlook\n", "  Looking — ☕.\n", shell("shell", "echo look")),
                say("\nDone.\n", "\nNothing found ✅.  "),
                say("\nAgain?\n", "It is as I said.\n"),
                say("\nSure.\n", "Nothing — naïve ☕.\n"),
            ]
        },
        in_order("Look around.", "Are you sure?", "And now?"),
        [("root", "", 2), ("branch", "unrecognised-reply", 1), ("resplice", "context-edited", 1)],
        "the program writes `[blank text]` over an answer with a text, then `INVALID_TOOL_NAME` over a valid name: neither is taken for "
        "the reply, so a sequence begins",
        environment={"LAB_EDITS": "1"},
        sends="INVALID_TOOL_NAME",
    ),
}


def scripts():
    """Episodes for the scripted model: those of all structures."""
    side = say("\nA title is wanted.\n", "Look Around")
    return {
        name: {"turns": turns, "side": side, "asked": structure.asked}
        for structure in STRUCTURES.values()
        for name, turns in structure.episodes.items()
    }

"""How each harness is installed and run here, and the arguments that give it a task.

How a harness is pointed at the proxy (variables, configuration files) is not here: the tests start each as `tokencache run` does, from its
adapter in `harness_adapters/`, so the adapters are tested, too. Here is what a user adds after `tokencache run HARNESS --`: the arguments
that give a task without a terminal, and those that continue with another.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from namespace import WORK
from rig.miniswe import default_venv as miniswe_venv
from rig.server import REPOSITORY

from tokencache.adapters.load import load

AGENTS = Path(__file__).resolve().parent / "agents"
PACKAGES = {
    "claude-code": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "opencode": "opencode-ai",
    "qwen-code": "@qwen-code/qwen-code",
    "gemini-cli": "@google/gemini-cli",
    "pi": "@earendil-works/pi-coding-agent",
    "kimi-code": "@moonshot-ai/kimi-code",
    "hermes": "hermes_agent",
    "mini-swe-agent": "mini_swe_agent",
    "openhands": "openhands_sdk",
    "terminus-2": "harbor",
    "pydantic-ai": "pydantic_ai_slim",
    "openai-agents": "openai_agents",
    "copilot": "@github/copilot",
    "kilo": "@kilocode/cli",
    "continue": "@continuedev/cli",
    "computer-use": "anthropic",
    "browser-use": "browser_use",
    "strands": "strands_agents",
    "google-adk": "google_adk",
}
"""The name under which an adapter's harness is installed, if it differs."""
NODE_24 = ".node24/bin"
NPM = "node_modules/.bin"
VENV = "bin"


def harness_dir():
    """Where `install.sh` installs the programs: `$TOKENCACHE_E2E_HARNESS_DIR`, or `.harnesses` in the repository."""
    return Path(os.environ.get("TOKENCACHE_E2E_HARNESS_DIR") or REPOSITORY / ".harnesses")


@dataclass(frozen=True)
class Step:
    """One process of a run: its arguments, and when to interrupt it, if at all (`namespace.run_isolated`).

    `{port}` in an argument is the port at which the harness reaches the relay.
    """

    words: list
    interrupt: tuple | None = None


@dataclass(frozen=True)
class Program:
    """How a harness is started. `folder` is where it is installed, `programs` the folder in it with its executables."""

    name: str
    dialect: str
    programs: str
    first: Callable
    """Task → the program's arguments; all tasks at once if there is no `again`."""
    again: Callable | None = None
    """The same for a further task in the same conversation, in a new process."""
    environment: dict = field(default_factory=dict)
    """What a user would set besides the adapter's variables."""
    adapter_name: str = ""
    folder: str = ""
    path: tuple = ()
    """Further folders with programs that it needs."""

    @property
    def adapter(self):
        return load(self.adapter_name or self.name)

    @property
    def home(self):
        return harness_dir() / (self.folder or self.adapter_name or self.name)

    @property
    def search_path(self):
        """The harness's $PATH: its own executables are first."""
        own = [self.home / self.programs, *(harness_dir() / folder for folder in self.path)]
        return os.pathsep.join([*map(str, own), os.environ["PATH"]])

    @property
    def installed(self):
        return (self.home / self.programs).is_dir() and not (self.home / ".why-not").exists()

    @property
    def version(self):
        """The installed version, from the package's metadata."""
        package = PACKAGES.get(self.name) or PACKAGES.get(self.adapter.name, self.adapter.name)
        if self.programs == NPM:
            return json.loads((self.home / "node_modules" / package / "package.json").read_text(encoding="utf-8"))["version"]
        (metadata,) = self.home.glob(f"lib/python3*/site-packages/{package}-*.dist-info")
        return metadata.name.removesuffix(".dist-info").rpartition("-")[2]

    def why_not(self):
        """Why it is not installed, as the installer recorded it."""
        note = self.home / ".why-not"
        return note.read_text().strip() if note.exists() else f"not in {self.home}: run tests/system/e2e/harnesses/install.sh"

    def steps(self, tasks):
        """One process for all tasks, or one for each."""
        if self.again is None:
            return [Step(self.first(*tasks))]
        return [Step(self.first(tasks[0])), *(Step(self.again(task)) for task in tasks[1:])]


def script(name):
    """A harness that is a library: its program is one of ours, in `agents/`."""
    return lambda *tasks: ["python", str(AGENTS / name), *tasks]


def claude(*words):
    return ["-p", *words, "--dangerously-skip-permissions", "--output-format", "json"]


QUIET = {"ANONYMIZED_TELEMETRY": "false", "BROWSER_USE_CLOUD_SYNC": "false", "BROWSER_USE_VERSION_CHECK": "false"}
"""browser-use reports to its makers if it is not told otherwise."""
BUILT_IN = ["-c", 'model_provider="openai"', "-c", 'openai_base_url="http://127.0.0.1:{port}/s/lab/h/codex/v1"']
"""Arguments with which Codex uses its own provider at our address, and not the one of its configuration file."""
CODEX = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
OPENCLAW = ["agent", "--local", "--agent", "main", "--thinking", "medium", "--message"]

PROGRAMS = {
    program.name: program
    for program in (
        Program(
            "claude-code",
            "messages",
            NPM,
            first=claude,
            again=lambda task: claude(task, "--continue"),
            environment={"IS_SANDBOX": "1"},  # as root it runs only if it is told that this is a sandbox
        ),
        Program(
            "codex",
            "responses",
            NPM,
            first=lambda task: ["exec", *CODEX, task],
            again=lambda task: ["exec", "resume", "--last", *CODEX, task],
        ),
        Program(
            "hermes",
            "chat",
            VENV,
            first=lambda task: ["chat", "-q", task, "-Q", "--yolo"],
            again=lambda task: ["chat", "--continue", "-q", task, "-Q", "--yolo"],
        ),
        Program(
            "opencode",
            "chat",
            NPM,
            first=lambda task: ["run", task, "--format", "json"],
            again=lambda task: ["run", "--continue", task, "--format", "json"],
        ),
        Program(
            "mini-swe-agent",
            "chat",
            VENV,
            first=lambda task: ["-t", task, "-y", "--exit-immediately"],
            folder=str(miniswe_venv().absolute()),
        ),
        Program("openai-agents", "responses", VENV, first=script("openai_agents.py"), environment={"LAB_API": "responses"}),
        Program(
            "openai-agents-chat",
            "chat",
            VENV,
            first=script("openai_agents.py"),
            environment={"LAB_API": "chat_completions"},
            adapter_name="openai-agents",
        ),
        Program("langgraph", "chat", VENV, first=script("langgraph_agent.py")),
        Program("pydantic-ai", "chat", VENV, first=script("pydantic_agent.py")),
        Program("smolagents", "chat", VENV, first=script("smol_agent.py")),
        Program("crewai", "chat", VENV, first=script("crewai_agent.py")),
        Program("strands", "chat", VENV, first=script("strands_agent.py")),
        Program("google-adk", "chat", VENV, first=script("adk_agent.py"), environment={"LAB_API": "chat"}),
        Program(
            "google-adk-gemini",
            "gemini",
            VENV,
            first=script("adk_agent.py"),
            environment={"LAB_API": "gemini"},
            adapter_name="google-adk",
        ),
        Program("agno", "chat", VENV, first=script("agno_agent.py")),
        Program("openhands", "chat", VENV, first=script("openhands_agent.py")),
        Program("terminus-2", "chat", VENV, first=script("terminus_agent.py")),
        Program("computer-use", "messages", VENV, first=script("computer_use.py"), adapter_name="anthropic", folder="computer-use"),
        Program(
            "browser-use", "chat", VENV, first=script("browser_agent.py"), adapter_name="openai", folder="browser-use", environment=QUIET
        ),
        Program(
            "qwen-code",
            "chat",
            NPM,
            first=lambda task: ["-p", task, "--yolo"],
            again=lambda task: ["--continue", "-p", task, "--yolo"],
            path=(NODE_24,),
        ),
        Program(
            "gemini-cli",
            "gemini",
            NPM,
            first=lambda task: ["-p", task, "--yolo"],
            again=lambda task: ["--resume", "latest", "-p", task, "--yolo"],
        ),
        Program(
            "pi",
            "chat",
            NPM,
            first=lambda task: ["--thinking", "medium", "--approve", "-p", task],
            again=lambda task: ["--thinking", "medium", "--approve", "-c", "-p", task],
            path=(NODE_24,),
        ),
        Program(
            "kimi-code",
            "chat",
            NPM,
            first=lambda task: ["-p", task],
            again=lambda task: ["-c", "-p", task],
            path=(NODE_24,),
        ),
        Program(
            "openclaw",
            "chat",
            NPM,
            first=lambda task: [*OPENCLAW, task],
            again=lambda task: [*OPENCLAW, task],
            environment={"OPENCLAW_WORKSPACE_DIR": str(WORK)},
            path=(NODE_24,),
        ),
        Program(
            "copilot",
            "chat",
            NPM,
            first=lambda task: ["-p", task, "--allow-all-tools"],
            again=lambda task: ["--continue", "-p", task, "--allow-all-tools"],
            path=(NODE_24,),
        ),
        Program(
            "kilo",
            "chat",
            NPM,
            first=lambda task: ["run", task, "--format", "json", "--auto"],
            again=lambda task: ["run", "--continue", task, "--format", "json", "--auto"],
            path=(NODE_24,),
        ),
        Program("cline", "chat", NPM, first=lambda task: ["--json", task], path=(NODE_24,)),
        Program(
            "continue",
            "chat",
            NPM,
            first=lambda task: ["--auto", "-p", task],
            again=lambda task: ["--auto", "--resume", "-p", task],
            path=(NODE_24,),
        ),
        Program("droid", "chat", NPM, first=lambda task: ["exec", "--skip-permissions-unsafe", task], path=(NODE_24,)),
    )
}

"""Names the test folders whose whole a change needs: `python -m tests.support.changed [BASE]`.

The change is what differs from the merge base with BASE (`origin/main` if none is given). Prints the folders with commas between, for
`pytest --whole`, and why on standard error. Everything runs if the change touches what everything rests on, or if there is no base to
compare with, as on `main` itself.
"""

import subprocess
import sys
from collections.abc import Iterable

EVERYTHING = "tests"
RESTS_ON = {
    "adapters": ("tests/adapters", "tests/commands", "tests/system/e2e/harnesses"),
    "api": ("tests/api", "tests/client", "tests/commands"),
    "batching": ("tests/batching",),
    "client": ("tests/client", "tests/commands", "tests/integrations"),
    "commands": ("tests/commands",),
    "demo": ("tests/demo",),
    "dialects": ("tests/dialects", "tests/proxy", "tests/system"),
    "engine": ("tests/engine", "tests/proxy", "tests/system"),
    "integrations": ("tests/integrations", "tests/system/nemo"),
    "proxy": ("tests/proxy", "tests/server", "tests/system"),
    "scoring": ("tests/scoring", "tests/system/e2e"),
    "server": ("tests/server", "tests/system/faults"),
    "trajectories": ("tests/trajectories", "tests/batching", "tests/commands", "tests/system"),
}
"""The test folders that a change of a package can break. A package that is missing, such as `core` and `store`, is below everything."""
BESIDE = {
    "bench": ("tests/bench",),
    "deploy": ("tests/deploy",),
    "docs": ("tests/docs",),
    "examples": ("tests/system/e2e",),
    "harness_adapters": ("tests/adapters",),
    "vllm_plugin": ("tests/vllm_plugin", "tests/system/e2e"),
}
"""Folders outside the package."""


def folders(paths: Iterable[str]) -> list[str]:
    """The test folders whose whole a change of these files needs; `[EVERYTHING]` if there are no limits to what it can break."""
    found = {folder for path in paths for folder in _folders(path)}
    return [EVERYTHING] if EVERYTHING in found else sorted(found)


def _folders(path: str) -> tuple[str, ...]:
    top, *rest = path.split("/")
    if top == "tests" and len(rest) > 1 and rest[0] != "support":
        return ("/".join(["tests", *rest[: 2 if rest[0] == "system" and len(rest) > 2 else 1]]),)
    if top == "tokencache" and rest[0] in RESTS_ON:
        return RESTS_ON[rest[0]]
    if top in BESIDE:
        return BESIDE[top]
    return () if path.endswith((".md", "LICENSE")) else (EVERYTHING,)


def main(base: str = "origin/main") -> None:
    """Prints the folders, and why."""
    found = _changed(base)
    chosen = [EVERYTHING] if found is None else folders(found)
    why = f"there is no earlier commit of {base} to compare with" if found is None else f"{len(found)} files changed since {base}"
    print(f"whole tests: {', '.join(chosen) or 'none'} ({why})", file=sys.stderr)
    print(",".join(chosen))


def _changed(base: str) -> list[str] | None:
    """The files that differ from the merge base; `None` if there is none, or if it is this very commit."""
    merge_base, head = _git("merge-base", "HEAD", base), _git("rev-parse", "HEAD")
    if not merge_base or merge_base == head:
        return None
    return _git("diff", "--name-only", merge_base, "HEAD").splitlines()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Counts the product files that one warm chat call runs through, and the moves between them: `python -m bench.call_path`.

The call is the fourth turn of a session (memory store), once whole and once streamed (`bench.warm_call`). Product files are those of
`tokencache/`, without `tokencache/testing/`, in which a function ran. A move is a function that was called, or a coroutine that resumed, in
another product file than the one before. *Frames above*: the most product functions that wait above a request to the engine.
"""

import asyncio
from collections import Counter
from traceback import walk_stack
from types import FrameType
from typing import Any

from bench.warm_call import PACKAGE, Talk, follow_last_call


class CallPath:
    """The product files that a thread runs through, in order; consecutive entries of one file count once."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.depth = 0

    def follow(self, frame: FrameType, event: str, _arg: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and not file.startswith(f"{PACKAGE}testing/"):
            name = file.removeprefix(PACKAGE)
            if not self.files or self.files[-1] != name:
                self.files.append(name)
                if name == "engine/upstream.py":
                    above = (one.f_code.co_filename for one, _ in walk_stack(frame.f_back))
                    self.depth = max(self.depth, sum(waiting.startswith(PACKAGE) for waiting in above))

    def figures(self) -> dict[str, int]:
        entered = set(self.files)
        proxy = [name for name in entered if name.startswith("proxy/")]
        return {"product files": len(entered), "modules of proxy/": len(proxy), "moves": len(self.files) - 1, "frames above": self.depth}


async def measured(*, stream: bool) -> CallPath:
    """Makes the calls and traces the last one."""
    path = CallPath()
    await follow_last_call(Talk(stream=stream), path.follow)
    return path


def main() -> None:
    for title, stream in (("whole reply", False), ("stream", True)):
        path = asyncio.run(measured(stream=stream))
        print(title)
        for name, figure in (*path.figures().items(), *sorted(Counter(path.files).items())):
            print(f"  {name:40}{figure:4}")


if __name__ == "__main__":
    main()

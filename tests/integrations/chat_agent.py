"""A harness for tests: the program of an agent that speaks chat completions, and does what its task says.

usage: chat_agent.py TASK, a JSON object. Its members, all optional: `turns` (2), `exit` (0), and `once`: the path of a file. If the file is
not there, the agent makes it, and ends with exit code 3. If `hang` is true, it writes its process id to `pid`, and never ends. It writes
the reward that it deserves, a random number, to `reward.txt`.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import httpx2


def ask(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "temperature": 0.1}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    answer = httpx2.post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json=body, headers=headers, timeout=None, trust_env=False)
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def made(path):
    """Make a file; false if it is there already."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main(task):
    messages = [{"role": "user", "content": "Guess."}]
    for _ in range(task.get("turns", 2)):
        said = ask(messages).strip()
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again!"}]
    if task.get("hang"):
        Path(task["pid"]).write_text(str(os.getpid()))
        time.sleep(3600)
    Path("reward.txt").write_text(str(random.random()))
    if "once" in task and made(task["once"]):
        sys.exit(3)
    sys.exit(task.get("exit", 0))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""An agent of browser-use, with Chromium and the pages in its directory, at http://127.0.0.1:`PORT`. usage: browser_agent.py TASK"""

import asyncio
import os
import shutil
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from browser_use import Agent, Browser, ChatOpenAI

PORT = 8123
"""browser-use makes screenshots only of pages that come over HTTP."""
PROFILE = Path("profile").absolute()
SIZE = {"width": 320, "height": 240}


async def main():
    threading.Thread(target=ThreadingHTTPServer(("127.0.0.1", PORT), SimpleHTTPRequestHandler).serve_forever, daemon=True).start()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    browser = Browser(
        executable_path=chromium,
        headless=True,
        chromium_sandbox=False,
        enable_default_extensions=False,
        user_data_dir=PROFILE,
        viewport=SIZE,
        window_size=SIZE,
    )
    agent = Agent(
        task=sys.argv[1],
        llm=ChatOpenAI(model=os.environ["OPENAI_MODEL"]),
        browser=browser,
        use_vision=True,
        use_judge=False,
        directly_open_url=False,
    )
    found = await agent.run(max_steps=6)
    print(found.final_result())
    sys.exit(not found.is_successful())


asyncio.run(main())

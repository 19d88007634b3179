"""An agent that uses the official clients, with the same or another dialect at every turn.

agent = Agent(url, "a-session").say("hello")
reply = await agent.turn("messages", stream=True)
"""

from rig.sdk import Pictured
from rig.sdk_anthropic import Messages
from rig.sdk_gemini import Gemini
from rig.sdk_openai import Chat, Responses

CLIENTS = {client.name: client for client in (Chat, Messages, Responses, Gemini)}


class Agent:
    """One rollout in its session, or directly on an engine (`session=None`)."""

    def __init__(self, url, session, **manner):
        self.url, self.session, self.manner = url, session, manner
        self.clients = {}
        self.history = []
        self.replies = []
        self.pictures = []
        """PNG files that the next user messages and tool results have."""

    def client(self, dialect):
        if dialect not in self.clients:
            self.clients[dialect] = CLIENTS[dialect](self.url, self.session, **self.manner)
        return self.clients[dialect]

    def say(self, text, *images):
        self.history.append(("user", Pictured(text, images) if images else text))
        return self

    async def turn(self, dialect, *, stream):
        """Makes a call and continues from the reply."""
        client = self.client(dialect)
        return self.take(await client.send(client.request(self.history), stream=stream))

    def take(self, reply):
        """Continues from a reply: its calls are answered, or a user message is added."""
        self.replies.append(reply)
        self.history.append(("reply", reply))
        results = [(call, name, self.result(name)) for call, name, _ in reply.calls]
        self.history.append(("results", results) if results else ("user", self.picture("Go on — ☕.")))
        return reply

    def result(self, name):
        return self.picture(f"{name}: naïve 東京\n")

    def picture(self, text):
        """Adds the next of `pictures` to a text, if there is one."""
        return Pictured(text, [self.pictures.pop(0)]) if self.pictures else text

    async def close(self):
        for client in self.clients.values():
            await client.close()

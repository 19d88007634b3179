"""An agent's loop in each dialect, with the official clients; replies are sent back as these clients return them."""

import anthropic
import openai
from google import genai
from google.genai import types

from tests.proxy.kit import HEADER, TOOLS, echo, results, user

DECLARED = TOOLS[0]["function"]


async def chat(rig, session, turns, *, stream, start="EPISODE:demo", **more):
    messages = [user(start)]
    for _ in range(turns):
        message = await rig.say(session, messages, tools=TOOLS, stream=stream, **more)
        messages += [echo(message), *results(message)]


async def anthropic_messages(rig, session, turns, *, stream, start="EPISODE:demo", model="sim"):
    tool = {"name": DECLARED["name"], "input_schema": DECLARED["parameters"]}
    history = [user(start)]
    async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="none", max_retries=0, default_headers={HEADER: session}) as sdk:
        for _ in range(turns):
            asked = {"model": model, "max_tokens": 400, "messages": history, "tools": [tool]}
            if stream:
                async with sdk.messages.stream(**asked) as events:
                    reply = await events.get_final_message()
            else:
                reply = await sdk.messages.create(**asked)
            used = [{"type": "tool_result", "tool_use_id": b.id, "content": "ok"} for b in reply.content if b.type == "tool_use"]
            history += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": used or "go on"}]


async def responses(rig, session, turns, *, stream, start="EPISODE:demo", model="sim"):
    tools = [{"type": "function", **DECLARED, "strict": False}]
    items = [user(start)]
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, default_headers={HEADER: session}) as sdk:
        for _ in range(turns):
            asked = {"model": model, "input": items, "tools": tools, "store": False}
            if stream:
                async with sdk.responses.stream(**asked) as events:
                    kinds = [event.type async for event in events]
                    reply = await events.get_final_response()
                assert kinds[-1] == "response.completed"
            else:
                reply = await sdk.responses.create(**asked)
            calls = [item for item in reply.output if item.type == "function_call"]
            found = [{"type": "function_call_output", "call_id": item.call_id, "output": "a.txt\n"} for item in calls]
            items += [*(item.model_dump(exclude_unset=True) for item in reply.output), *(found or [user("go on")])]


async def gemini(rig, session, turns, *, stream, start="EPISODE:demo", model="sim"):
    sdk = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=rig.url, headers={HEADER: session})).aio
    function = types.FunctionDeclaration(
        name=DECLARED["name"], description=DECLARED["description"], parameters_json_schema=DECLARED["parameters"]
    )
    settings = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[function])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    history = [types.Content(role="user", parts=[types.Part(text=start)])]
    for _ in range(turns):
        asked = {"model": model, "contents": history, "config": settings}
        if stream:
            contents = [r.candidates[0].content async for r in await sdk.models.generate_content_stream(**asked)]
        else:
            contents = [(await sdk.models.generate_content(**asked)).candidates[0].content]
        calls = [part.function_call for content in contents for part in content.parts if part.function_call]
        found = [types.Part(function_response=types.FunctionResponse(id=c.id, name=c.name, response={"output": "ok"})) for c in calls]
        history += [*contents, types.Content(role="user", parts=found or [types.Part(text="go on")])]


AGENTS = {"chat": chat, "messages": anthropic_messages, "responses": responses, "gemini": gemini}

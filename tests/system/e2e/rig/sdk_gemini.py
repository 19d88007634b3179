"""Google's official client, for the Gemini API."""

from google import genai
from google.genai import types

from rig.harness import TOOLS
from rig.sdk import LIMIT, SYSTEM, Client, Reply, rewritten
from rig.server import MODEL


class Gemini(Client):
    name = "gemini"

    def connect(self, url):
        return genai.Client(api_key="none", http_options=types.HttpOptions(base_url=url))

    def config(self):
        declared = [
            {"parameters_json_schema": tool["function"]["parameters"]}
            | {name: value for name, value in tool["function"].items() if name != "parameters"}
            for tool in TOOLS
        ]
        return types.GenerateContentConfig(
            system_instruction=SYSTEM,
            tools=[types.Tool(function_declarations=[types.FunctionDeclaration(**function) for function in declared])],
            thinking_config=types.ThinkingConfig(include_thoughts=not self.forgetful),
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
            max_output_tokens=LIMIT,
        )

    def contents(self, history):
        contents = []
        for kind, entry in history:
            if kind == "user":
                contents.append(types.Content(role="user", parts=_parts(entry)))
            elif kind == "results":
                answers = [_response(call, name, said) for call, name, said in entry]
                contents.append(types.Content(role="user", parts=[types.Part(function_response=answer) for answer in answers]))
            else:
                contents += self.native(entry) or [types.Content(role="model", parts=self.parts(entry))]
        return contents

    def parts(self, reply):
        thought, text = self.thought_and_text(reply)
        parts = [types.Part(text=thought, thought=True)] if thought else []
        parts += [types.Part(text=text)] if text else []
        calls = [types.FunctionCall(id=call, name=name, args=rewritten(given)) for call, name, given in reply.calls]
        return parts + [types.Part(function_call=call) for call in calls]

    def request(self, history):
        return {"model": MODEL, "contents": self.contents(history), "config": self.config()}

    async def send(self, asked, *, stream):
        if stream:
            responses = [response async for response in await self.sdk.aio.models.generate_content_stream(**asked)]
        else:
            responses = [await self.sdk.aio.models.generate_content(**asked)]
        contents = [response.candidates[0].content for response in responses]
        parts = [part for content in contents for part in content.parts]
        calls = [part.function_call for part in parts if part.function_call]
        return Reply(
            self.name,
            contents,
            "".join(part.text for part in parts if part.text and part.thought),
            "".join(part.text for part in parts if part.text and not part.thought),
            [(call.id, call.name, call.args) for call in calls],
            responses[-1].candidates[0].finish_reason.value,
            responses[-1].usage_metadata.prompt_token_count,
        )

    async def count(self, history):
        """Counts a whole request, as the API can; its client accepts only the contents, so the rest is inserted by hand."""

        def written(value):
            return value.model_dump(mode="json", by_alias=True, exclude_none=True)

        config = self.config()
        whole = {
            "contents": [written(content) for content in self.contents(history)],
            "systemInstruction": {"parts": [{"text": SYSTEM}]},
            "tools": [written(tool) for tool in config.tools],
        }
        options = types.HttpOptions(extra_body={"generateContentRequest": whole})
        asked = types.CountTokensConfig(http_options=options)
        return (await self.sdk.aio.models.count_tokens(model=MODEL, contents="ignored", config=asked)).total_tokens

    async def close(self):
        await self.sdk.aio.aclose()


def _parts(said):
    if isinstance(said, str):
        return [types.Part(text=said)]
    return [types.Part(text=said.text), *(types.Part.from_bytes(data=image, mime_type="image/png") for image in said.images)]


def _response(call, name, said):
    if isinstance(said, str):
        return types.FunctionResponse(id=call, name=name, response={"output": said})
    blobs = [types.FunctionResponseBlob(data=image, mime_type="image/png") for image in said.images]
    parts = [types.FunctionResponsePart(inline_data=blob) for blob in blobs]
    return types.FunctionResponse(id=call, name=name, response={"output": said.text}, parts=parts)

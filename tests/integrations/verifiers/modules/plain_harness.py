"""A harness that asks the model in this process, and runs the tools that it calls."""

from __future__ import annotations

import json

import anthropic
import httpx
import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class PlainHarnessConfig(vf.HarnessConfig):
    most_calls: int = 4
    edits: bool = False
    """Change the first message of a chat that goes on."""
    api: str = "chat"
    """``chat``, ``stream``, ``responses`` or ``messages``, through the SDKs of OpenAI and Anthropic."""


class PlainHarness(vf.Harness[PlainHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        if self.config.edits and len(messages) > 2:
            messages[1]["content"] += "!"
        if self.config.api != "chat":
            await SDKS[self.config.api](endpoint, secret, ctx.model, messages)
            return vf.ProgramResult(0, "", "")
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            places = {}
            for url in mcp_urls.values():
                for tool in (await rpc(http, url, "tools/list"))["tools"]:
                    places[tool["name"]] = url, tool
            tools = [
                {"type": "function", "function": {"name": name, "parameters": tool["inputSchema"]}}
                for name, (_, tool) in places.items()
            ]
            for _ in range(self.config.most_calls):
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})},
                )
                if answer.status_code != 200:
                    return vf.ProgramResult(1, "", answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    name = call["function"]["name"]
                    given = {"name": name, "arguments": json.loads(call["function"]["arguments"])}
                    found = await rpc(http, places[name][0], "tools/call", given)
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": found["content"][0]["text"]}
                    )
        return vf.ProgramResult(0, "", "")


async def stream(endpoint, secret, model, messages):
    async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
        async for _ in await client.chat.completions.create(model=model, messages=messages, stream=True):
            pass


async def responses(endpoint, secret, model, messages):
    given = [{"role": message["role"], "content": message["content"]} for message in messages]
    async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
        await client.responses.create(model=model, input=given)


async def anthropic_messages(endpoint, secret, model, messages):
    given = {"model": model, "max_tokens": 100, "system": messages[0]["content"], "messages": messages[1:]}
    if messages[0]["role"] != "system":
        given |= {"messages": messages, "system": anthropic.NOT_GIVEN}
    async with anthropic.AsyncAnthropic(base_url=endpoint.removesuffix("/v1"), api_key=secret) as client:
        await client.messages.create(**given)


SDKS = {"stream": stream, "responses": responses, "messages": anthropic_messages}


async def rpc(http, url, method, params=None):
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
    answer = await http.post(url, json=body, headers={"Accept": "application/json, text/event-stream"})
    answer.raise_for_status()
    return answer.json()["result"]


__all__ = ["PlainHarness"]

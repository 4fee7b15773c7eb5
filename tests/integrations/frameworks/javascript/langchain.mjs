// LangChain.js: an agent with a tool.
import { readFileSync, writeFileSync } from "node:fs";
import { ChatAnthropic } from "@langchain/anthropic";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";

const question = JSON.parse(readFileSync(process.env.TURNWISE_QUESTION, "utf8"));
const models = {
  chat: () => new ChatOpenAI({ model: "agent" }),
  responses: () => new ChatOpenAI({ model: "agent", useResponsesApi: true }),
  messages: () => new ChatAnthropic({ model: "agent", anthropicApiUrl: process.env.ANTHROPIC_BASE_URL }),
};
const add = tool(({ a, b }) => `sum is ${a + b}`, {
  name: "add",
  description: "Adds two numbers.",
  schema: z.object({ a: z.number(), b: z.number() }),
});
const agent = createAgent({ model: models[process.argv[2]](), tools: [add] });
const messages = [{ role: "user", content: question.text }];
let last;
if (process.argv[3] === "streamed") {
  for await (const { messages: all } of await agent.stream({ messages }, { streamMode: "values" })) last = all.at(-1);
} else {
  last = (await agent.invoke({ messages })).messages.at(-1);
}
writeFileSync(process.env.TURNWISE_RESULT, JSON.stringify(Number(last.text.includes(question.answer))));

// Mastra: an agent with a tool, by the model's URL.
import { readFileSync, writeFileSync } from "node:fs";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const question = JSON.parse(readFileSync(process.env.TURNWISE_QUESTION, "utf8"));
const add = createTool({
  id: "add",
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ context, a, b }) => `sum is ${(context?.a ?? a) + (context?.b ?? b)}`,
});
const agent = new Agent({
  name: "adder",
  instructions: "Add.",
  model: { id: "gateway/agent", url: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY },
  tools: { add },
});
const text =
  process.argv[2] === "streamed" ? await (await agent.stream(question.text)).text : (await agent.generate(question.text)).text;
writeFileSync(process.env.TURNWISE_RESULT, JSON.stringify(Number(text.includes(question.answer))));

// The OpenAI Agents SDK: an agent with a tool, and one that hands off to it.
import { readFileSync, writeFileSync } from "node:fs";
import { Agent, run, setOpenAIAPI, tool } from "@openai/agents";
import { z } from "zod";

const question = JSON.parse(readFileSync(process.env.TURNWISE_QUESTION, "utf8"));
const [api, way] = process.argv.slice(2);
setOpenAIAPI(api === "chat" ? "chat_completions" : "responses");
const add = tool({
  name: "add",
  description: "Adds two numbers.",
  parameters: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => `sum is ${a + b}`,
});
const adder = new Agent({ name: "adder", instructions: "Add.", model: "agent", tools: [add] });
const desk = new Agent({ name: "desk", instructions: "Hand off.", model: "agent", handoffs: [adder] });
const result = await run(way === "handoff" ? desk : adder, question.text, { stream: way === "streamed" });
if (way === "streamed") await result.completed;
writeFileSync(process.env.TURNWISE_RESULT, JSON.stringify(Number(result.finalOutput.includes(question.answer))));

// The AI SDK with its OpenAI provider, which names earlier items by their ids, and with Anthropic's.
import { readFileSync, writeFileSync } from "node:fs";
import { anthropic } from "@ai-sdk/anthropic";
import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const question = JSON.parse(readFileSync(process.env.TURNWISE_QUESTION, "utf8"));
const models = { responses: openai("agent"), chat: openai.chat("agent"), messages: anthropic("agent") };
const [api, way] = process.argv.slice(2);
const add = tool({
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => `sum is ${a + b}`,
});
const options = { model: models[api], tools: { add }, stopWhen: stepCountIs(5), maxRetries: 0, prompt: question.text };
const text = way === "streamed" ? await streamText(options).text : (await generateText(options)).text;
writeFileSync(process.env.TURNWISE_RESULT, JSON.stringify(Number(text.includes(question.answer))));

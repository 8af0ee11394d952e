// What SDKs of Node make of the gateway: prints one JSON object. Arguments: the gateway's base URL, the busy server's.
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";
import OpenAI from "openai";

const [gateway, busy] = process.argv.slice(2);
const model = "scripted";
const long = "word ".repeat(20000);
const messages = (content) => [{ role: "user", content }];
const seen = {};

async function failure(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error("nothing was raised");
}

const openai = new OpenAI({ baseURL: `${gateway}/v1`, apiKey: "dummy" });
const create = (content, stream) => openai.chat.completions.create({ model, messages: messages(content), stream });
for (const stream of [false, true]) {
  const error = await failure(() => create(long, stream));
  const bad = error instanceof OpenAI.BadRequestError;
  seen[`openai overflow, stream ${stream}`] = { bad, status: error.status, code: error.code, param: error.param };
}
let text = "";
for await (const chunk of await create("Hello.", true)) text += chunk.choices[0]?.delta?.content ?? "";
seen["openai stream"] = text;
const patient = new OpenAI({ baseURL: `${busy}/v1`, apiKey: "dummy" });
const answer = await patient.chat.completions.create({ model, messages: messages("openai") });
seen["openai after busy"] = answer.choices[0].message.content;

const provider = createOpenAICompatible({ name: "gw", baseURL: `${gateway}/v1`, apiKey: "dummy", includeUsage: true });
const overflow = await failure(() => generateText({ model: provider(model), prompt: long }));
seen["ai overflow"] = {
  api: APICallError.isInstance(overflow),
  status: overflow.statusCode,
  retryable: overflow.isRetryable,
  code: JSON.parse(overflow.responseBody).error.code,
  message: overflow.message,
};
const parts = [];
for await (const part of streamText({ model: provider(model), prompt: "Hello.", onError() {} }).fullStream) parts.push(part);
seen["ai stream"] = {
  text: parts.filter((part) => part.type === "text-delta").map((part) => part.text ?? part.delta).join(""),
  errors: parts.filter((part) => part.type === "error").map((part) => String(part.error)),
  finish: parts.find((part) => part.type === "finish")?.finishReason,
  usage: parts.find((part) => part.type === "finish")?.totalUsage?.outputTokens,
};
const waiting = createOpenAICompatible({ name: "gw", baseURL: `${busy}/v1`, apiKey: "dummy" });
seen["ai after busy"] = (await generateText({ model: waiting(model), prompt: "ai" })).text;

const anthropic = new Anthropic({ baseURL: gateway, apiKey: "dummy" });
const ask = (content) => anthropic.messages.create({ model, max_tokens: 50, messages: messages(content) });
const refused = await failure(() => ask(long));
seen["anthropic overflow"] = {
  bad: refused instanceof Anthropic.BadRequestError,
  type: refused.error?.error?.type,
  message: refused.error?.error?.message,
  id: Boolean(refused.requestID ?? refused.request_id),
};
const stream = anthropic.messages.stream({ model, max_tokens: 50, messages: messages("Hello.") });
seen["anthropic stream"] = await stream.finalText();
console.log(JSON.stringify(seen));

// OpenAI's Node SDK against the gateways of a test, GATEWAY_URL with odd engines and VECTORS_URL with one for embeddings:
// what it made of the answers, as one line of JSON.
import OpenAI from "openai";

const baseURL = `${process.env.GATEWAY_URL}/v1`;
const messages = [{ role: "user", content: "hi" }];
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const seen = {};

// The helper calls our function, sends the result back, and asks until it is given text alone.
const looks = [];
const schema = { type: "object", properties: { where: { type: "string" } }, required: ["where"] };
const tool = (run) => ({ type: "function", function: { name: "look", parameters: schema, parse: JSON.parse, function: run } });
const runner = client.chat.completions.runTools(
  { model: "caller", messages, tools: [tool(({ where }) => looks.push(where) && "rain")], stream: true },
  { maxChatCompletions: 2 },
);
const calls = [];
runner.on("functionToolCall", (call) => calls.push(call.name));
await runner.done();
seen.tools = { looks: looks.slice(0, 2), calls: calls.slice(0, 2), roles: runner.messages.map((message) => message.role).slice(0, 4) };

const thoughts = client.chat.completions.stream({ model: "thinker", messages });
const deltas = [];
thoughts.on("content", (delta) => deltas.push(delta));
seen.stream = { content: await thoughts.finalContent(), deltas: deltas.join("") };

const responses = client.responses.stream({ model: "thinker", input: "hi" });
seen.response = (await responses.finalResponse()).output_text;

const gone = new AbortController();
const long = await client.chat.completions.create({ model: "slow", messages, stream: true }, { signal: gone.signal });
for await (const _ of long) gone.abort();

const vectors = new OpenAI({ baseURL: `${process.env.VECTORS_URL}/v1`, apiKey: "none", maxRetries: 0 });
const embedded = async (format) =>
  (await vectors.embeddings.create({ model: "vectors", input: ["sky", "sea"], ...format })).data.map((one) => one.embedding);
const [decoded, plain] = [await embedded({}), await embedded({ encoding_format: "float" })];
seen.embeddings = {
  lengths: decoded.map((vector) => vector.length),
  apart: Math.max(...decoded.flatMap((vector, row) => vector.map((value, place) => Math.abs(value - plain[row][place])))),
};

const fault = async (promise) => {
  try {
    await promise;
    return "none";
  } catch (error) {
    return [error.constructor.name, error.status ?? null, error.code ?? null];
  }
};
seen.faults = {
  unknown: await fault(client.chat.completions.create({ model: "no/such", messages })),
  overflow: await fault(client.chat.completions.create({ model: "slow", messages, max_tokens: 5000 })),
  tries: await fault(client.withOptions({ maxRetries: 2 }).chat.completions.create({ model: "failing", messages, max_tokens: 100 })),
  once: await fault(client.withOptions({ maxRetries: 2 }).chat.completions.create({ model: "unending", messages, max_tokens: 100 })),
};

console.log(JSON.stringify(seen));

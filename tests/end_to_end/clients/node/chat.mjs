// What an application does with the npm package `openai`, as one JSON object on standard output.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const settings = { model, messages, temperature: 0, max_tokens: 16 };

const models = [];
for await (const each of await client.models.list()) models.push(each.id);

const whole = await client.chat.completions.create(settings);

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...settings,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const helper = client.chat.completions.stream(settings);
const final = await helper.finalChatCompletion();

const completion = await client.completions.create({
  model,
  prompt: "The capital of France is",
  temperature: 0,
  max_tokens: 4,
});

const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const called = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "What is the weather in Paris?" }],
  temperature: 0,
  max_tokens: 64,
  tools: [{ type: "function", function: { name: "get_weather", description: "The weather of a city", parameters } }],
  tool_choice: "required",
  parallel_tool_calls: false,
});

const response = await client.responses.create({
  model,
  input: "What is the capital of France?",
  temperature: 0,
  max_output_tokens: 16,
});

let refusal = null;
try {
  await client.chat.completions.create({ ...settings, temperature: -1 });
} catch (error) {
  refusal = { status: error.status, param: error.param, kind: error.constructor.name };
}

console.log(
  JSON.stringify({
    models,
    whole: whole.choices[0].message.content,
    streamed,
    usage,
    final: final.choices[0].message.content,
    completion: completion.choices[0].text,
    calls: called.choices[0].message.tool_calls,
    response: response.output_text,
    refusal,
  }),
);

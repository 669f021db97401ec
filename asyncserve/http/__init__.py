"""The OpenAI-compatible HTTP interface, and the only home of aiohttp, orjson and msgspec.

In the order a request meets them: `tls` (certificates; `file_watch` notices new ones, `regular_file` reads
what operators name), `connection` (sockets, how many and how long, header limits and broken HTTP;
`open_files` says how many there can be), `app` (routes, middlewares), `cross_origin` (CORS), `auth` (API
keys), `body` (reading what was sent), `schema` (JSON to requests, every field named once; with
`message_schema`, `structure`), `conversation` (messages to one engine request, by way of `tools` and
`prompt_messages`), `parsers` (the model's text to reasoning, content and tool calls; `reasoning_tokens`
counts), `chat` and `completions` (the two endpoints and their shapes), `responses` (OpenAI's Responses API),
`messages` (Anthropic's; `field_names` puts errors in the words of both), `generation` (submit, wait, abort;
`caller` says for whom and until when), `sse` (streamed output straight to the connection, past its transport
by `borrowed_socket`; `outbox` writes many together, `write_pacing` says when, `slow_reader` what becomes of
who does not read), `logprobs` (token texts and scores as JSON values), `render` (calls that stop before the
engine), `tokenization` (/tokenize, /detokenize), `status` (health, load, models, versions, metrics;
`kv_ledger` accounts for the KV cache), `openapi` (/openapi.json, /docs and docs/api.md), `live_page` (the
page at /, and what it shows of the engine), `refusals` (endpoints there will not be), `batch_file` (requests
and answers in files), `failures` (exception to OpenAI's or Anthropic's error object). `serving` is what all
handlers share.
"""

"""The OpenAI-compatible HTTP interface, and the only home of aiohttp, orjson and msgspec.

In the order a request meets them: `connection` (sockets and broken HTTP), `app` (routes, middlewares),
`auth` (API keys), `body` (reading what was sent), `schema` (JSON to requests, every field named once), `chat`
and `completions` (the two endpoints and their shapes), `generation` (submit, wait, abort), `sse` (streamed
output straight to the transport), `logprobs` (token texts and scores as JSON values), `tokenization`
(/tokenize, /detokenize), `status` (health, models, version, metrics), `failures` (exception to OpenAI's error
object). `serving` is what all handlers share.
"""

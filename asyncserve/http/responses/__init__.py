"""/v1/responses: OpenAI's Responses API over the same engine requests as chat.

`schema` (bodies), `input` (a body to kept items and a `ChatBody`), `handlers`, `events` (the answer as items
and typed events), `background` (runs without a client), `store` (responses that are kept for a while).
"""

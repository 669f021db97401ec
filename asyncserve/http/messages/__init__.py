"""/v1/messages: Anthropic's API over the same engine requests as chat.

`schema` (bodies), `translation` (a body to a `ChatBody`), `handlers`, `blocks` (an answer's text to content
blocks), `shapes` (the message and its events), `partial_json` (the input of a tool while it is written).
"""

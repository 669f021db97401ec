"""What the API is, for programs and for people: /openapi.json, /docs and docs/api.md, made from the types.

`operations` (one row per route), `fields` (what types do not say of a body's fields), `shapes`,
`responses_shapes` and `messages_shapes` (answers), `document` (the whole), `docs_page`, `reference`.
"""

"""The live page at /: a chat with the served model, and the engine's pipeline as it runs.

In the order data takes: `recorder` (an `Observer` that keeps the last steps and minutes), `sampler` (one task
that makes a few events a second of it, for all viewers), `feed` (GET /pipeline/events, those events as a
stream), `page` (GET / and the files below /page/: plain HTML, CSS and ES modules in `files`, served as they
are). The page is no part of the API: its feed may change with it.
"""

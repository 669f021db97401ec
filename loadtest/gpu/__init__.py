"""A whole GPU, measured: `python -m loadtest.gpu`, run in the repository's root.

Two model shapes with random weights, through `LLM` and through the server over HTTP. In the order of a run:
`parts` (what there is to measure, each in a process of its own), `machine` (what a copy and a product reach),
`aims` (what is wanted), `vocabulary` (a tokenizer made up for a shape), `offline` (measured through `LLM`),
`step_record` (what the engine told of its steps), `steps` (decode alone, engine driven directly),
`kernel_times` (where a step's time goes), `online` (measured over HTTP), `results` (JSON and tables). The
server, who asks it, and what it could take at most: `loadtest.server_process`, `loadtest.client_processes`
and `loadtest.ceiling`. The programs that measure kernels alone are parts, too; `extent` says how much is
measured.
"""

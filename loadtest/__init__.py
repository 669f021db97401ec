"""Load tests for asyncserve, or any server with OpenAI's API: `python -m loadtest --url URL`.

In the order a request meets them: `options` (the command line; `scenarios/` holds runs as TOML), `load` (one
run's options), `session` (an invocation), `workload` with `sharegpt` and `token_counts` (what is asked),
`arrivals` (when), `sender` in `client_processes` on `cores`, with its `loop_lag` (who asks), `client` (asks
and takes times), `replay_server` and `ceiling` (what the client could take at most), `report` and `series`
(definitions, tables, curves), `results` (files). What is made of several runs: `sweep`, `search`, `pareto`,
`comparison`, and `html_report` with `svg` (a page). More programs stand beside it:
`loadtest.chaos` and `loadtest.fuzz` mistreat a running server and check what they leave behind;
`loadtest.soak` does so for long, to a server it starts with faults injected, and `loadtest.endings` ends one;
`loadtest.idle_connections` measures what connections cost that say nothing;
`loadtest.frontend`, `loadtest.parsing` and `loadtest.structured` measure parts of asyncserve on a CPU;
`loadtest.kv_use` counts how full the blocks of the KV cache are, and what is saved by sharing them;
`loadtest.gpu` measures everything on a GPU, without a server being there: model shapes with random weights;
`loadtest.kernels`, `loadtest.linears`, `loadtest.attention` and `loadtest.sampling` measure kernels alone;
`loadtest.host_tier` measures what the host's memory for KV blocks, and a prefix cache, cost and save;
`loadtest.accuracy` holds what a model says on a GPU against what it says on a CPU, `loadtest.cache_accuracy`
what it says with a KV cache of fewer bits against what it says with its own. They share `figures` (what is
kept, and said of the machine), `server_process` (a server that they start), `metrics_page` (its /metrics,
read), `model_shapes` (sizes of the models in `shapes/`), `engine_options` (`--option`) and
`kernel_benchmark`.
"""

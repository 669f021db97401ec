"""Load tests for asyncserve, or any server with OpenAI's API: `python -m loadtest --url URL`.

In the order a request meets them: `workload` (what is asked), `arrivals` (when), `client` (asks and takes
times), `report` (definitions, tables, files); `scenarios/` holds runs as TOML. More programs stand beside it:
`loadtest.chaos` and `loadtest.fuzz` mistreat a running server and check what they leave behind;
`loadtest.frontend`, `loadtest.parsing` and `loadtest.structured` measure parts of asyncserve on a CPU;
`loadtest.gpu` measures everything on a GPU, without a server being there: model shapes with random weights;
`loadtest.kernels`, `loadtest.linears`, `loadtest.attention` and `loadtest.sampling` measure kernels alone;
`loadtest.accuracy` holds what a model says on a GPU against what it says on a CPU. They share `figures`
(what is kept, and said of the machine), `model_shapes` (sizes of the models in `shapes/`) and
`kernel_benchmark`.
"""

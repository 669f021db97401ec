"""Load tests for asyncserve, or any server with OpenAI's API: `python -m loadtest --url URL`.

In the order a request meets them: `workload` (what is asked), `arrivals` (when), `client` (asks and takes
times), `report` (definitions, tables, files); `scenarios/` holds runs as TOML. Three more programs stand
beside it: `loadtest.chaos` mistreats a running server and checks what it leaves behind,
`loadtest.frontend` measures the streaming path of asyncserve alone, on a device side that costs nothing.
`loadtest.gpu` measures everything on a GPU, without a server being there: model shapes with random weights.
`loadtest.accuracy` holds what a model says on a GPU against what it says on a CPU.
"""

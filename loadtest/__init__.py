"""Load tests for asyncserve, or any server with OpenAI's API: `python -m loadtest --url URL`.

In the order a request meets them: `workload` (what is asked), `arrivals` (when), `client` (asks and takes
times), `report` (definitions, tables, files); `scenarios/` holds runs as TOML. Two more programs stand
beside it: `loadtest.chaos` mistreats a running server and checks what it leaves behind,
`loadtest.frontend` measures the streaming path of asyncserve alone, on a device side that costs nothing.
"""

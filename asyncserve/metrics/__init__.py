"""What Prometheus reads.

`catalogue` (every metric once), `observer` (what is counted when it happens: latencies, tokens, reasons),
`collector` (what is read when scraped: queues, blocks, caches), `http_traffic` (requests and connections of
the HTTP server), `vllm_names` (all of it once more under the names of vLLM, where asked for), `exposition`
(the text, written without holding up the loop).
"""

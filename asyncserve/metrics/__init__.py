"""What Prometheus reads.

`catalogue` (every metric once), `observer` (what is counted when it happens: latencies, tokens, reasons),
`collector` (what is read when scraped: queues, blocks, caches).
"""

"""Watching servers with Prometheus and Grafana: what is needed besides the servers themselves.

`dashboard` (the Grafana dashboard as code; `grafana/dashboards` has what it makes), `panels` (its building
blocks), `rules/` (recording and alert rules), `prometheus` (a real Prometheus that scrapes a server).
"""

"""What single requests and single steps did, written down for people to look at.

`requests` (a trace of each request for an OpenTelemetry collector), `otlp` (the way there), `steps` (a
timeline of every step for ui.perfetto.dev), `background` (a thread that writes, so that the loop does not).
"""

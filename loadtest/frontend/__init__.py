"""What a streamed token costs: `python -m loadtest.frontend`, run in the repository's root.

One process, pinned to one core, runs the real HTTP application, engine, scheduler and detokenizer over a
device side that answers every step with the next tokens of a text (`device`); a client in C, on another core,
reads. Reported are CPU time per token, user and kernel apart, from the first step in which every stream
decodes until the first stream ends, and tokens per second over the same span; how late the loop is meanwhile,
and its longest callback. Beside it, in the same run: what the kernel charges a C program for a write of the
same size, FastAPI's StreamingResponse, and the whole server with a tiny model.
"""

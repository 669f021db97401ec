"""KV events: what becomes of the prefix cache, published for routers that send requests to their prefix.

`settings` (the option), `wire` (the field's messages), `publisher` (the sockets, on a thread of their own).
"""

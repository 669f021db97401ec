"""A soak: a server under everything at once, for any time, with faults injected, held to account afterwards.

`python -m loadtest.soak --seconds 1200` starts the server itself, first without faults, to learn what every
question is answered with, then with them. `questions` are what is asked, `guests` who asks and how badly they
behave, `ledger` what became of each request and whether the server's metrics say the same, `watched_server`
and `residue` what is left afterwards, `report` the figures. What is mistreated and how often stands in a
scenario, a file of `loadtest/scenarios/soak`.
"""

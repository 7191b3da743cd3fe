"""`penstock conformance`: does a worker program, in whatever language, keep the rules of docs/protocol.md?

`endpoint.py` is what the program talks to, `station.py` runs it, `checks.py` has the rules, `command.py` the table.
"""

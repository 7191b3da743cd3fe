"""`penstock conformance`: does a worker program, in whatever language, keep the rules of docs/protocol.md?"""

"""The dashboard: HTML pages over the methods of JSON-RPC, live by server-sent events, without a build step.

An open page is rendered again every two seconds, and sent if it has changed. Reads and changes go through
:meth:`penstock.api.dispatch.Methods.call`, so permissions, checks and the audit are those of JSON-RPC.
"""

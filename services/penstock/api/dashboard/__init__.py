"""The dashboard: HTML pages over the methods of JSON-RPC, live by server-sent events, without a build step.

All goes through :meth:`penstock.api.dispatch.Methods.call`, so permissions, checks and the audit are those of JSON-RPC.
"""

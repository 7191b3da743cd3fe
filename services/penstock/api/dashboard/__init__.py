"""The dashboard: pages of HTML over the same methods that JSON-RPC has, live by server-sent events, no build step.

Pages are rendered here from templates; one that is open is rendered again every two seconds and sent what has changed.
Whatever is done goes through :meth:`penstock.api.dispatch.Methods.call`, so permissions, checks and the audit are those
of JSON-RPC.
"""

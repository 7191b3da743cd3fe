"""The Python client over HTTP (sync and async) and through the inbound queue."""

"""The vocabulary, without I/O: task states, retry, tenants, API keys, JSON-RPC messages, errors."""

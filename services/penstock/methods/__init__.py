"""Every JSON-RPC method: how a request is read, and how a body of the inbound queue is carried out."""

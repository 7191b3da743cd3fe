"""The Model Context Protocol: the methods of ``/rpc`` as tools of an agent (docs/decisions/069)."""

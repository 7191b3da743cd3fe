"""Small models of the core, every state of which is visited: `make models`."""

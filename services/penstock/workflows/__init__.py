"""Graphs of tasks: definition, advance, step inputs, store, methods."""

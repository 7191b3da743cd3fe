"""Graphs of tasks: definition, advance, step inputs, methods."""

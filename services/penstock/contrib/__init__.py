"""Integrations with frameworks; each is imported by programs that use its framework alone."""

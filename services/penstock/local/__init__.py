"""Embedded mode: Postgres, SQS and every process on one machine, by one command."""

"""Benchmarks of the whole pipeline on this machine: real processes, real Postgres with fsync, the embedded SQS."""

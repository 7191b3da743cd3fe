"""Schedules read from Kafka topics: process, feeds, Avro and JSON."""

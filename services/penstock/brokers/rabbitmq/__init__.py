"""Queues on RabbitMQ."""

"""What any process is made of: loop, periodic duties, health, logs, metrics, tracing, chaos."""

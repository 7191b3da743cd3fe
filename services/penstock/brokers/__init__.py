"""One contract for queues, a module or package a broker: SQS, RabbitMQ, Kafka."""

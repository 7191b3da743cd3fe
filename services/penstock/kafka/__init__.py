"""Kafka by confluent-kafka, for asyncio: a producer, a consumer, and the settings of both.

Who needs no Kafka never loads the library: it is imported when a producer or a consumer is opened.
"""

from penstock.kafka.consumer import KafkaConsumer
from penstock.kafka.producer import KafkaProducer
from penstock.kafka.records import Delivery, Partition, Position, Received, Record

__all__ = ["Delivery", "KafkaConsumer", "KafkaProducer", "Partition", "Position", "Received", "Record"]

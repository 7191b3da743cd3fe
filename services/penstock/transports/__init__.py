"""Message queues: ``base`` is the contract, each broker a module beside it."""

from penstock.transports.base import Depth, Limits, Message, Outgoing, Queue, SendReport, Transport

__all__ = ["Depth", "Limits", "Message", "Outgoing", "Queue", "SendReport", "Transport"]

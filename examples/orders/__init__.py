"""A shop: an order is stored with its task, which reserves, charges and ships once."""

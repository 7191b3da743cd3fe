"""The APIs of older schedulers, added on to api, worker and supervisor; the core does not know them."""

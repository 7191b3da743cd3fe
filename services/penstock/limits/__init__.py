"""Rate and concurrency limits of actions and tenants, pauses, routes, scaling figures."""

"""Child processes for handlers: the worker's pool, a fork server that has loaded the application, and the children."""

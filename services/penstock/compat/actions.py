"""Built-in actions of older schedulers, which workers run beside the deliveries."""

MODULES = {"scheduler0.callback": "penstock.compat.scheduler0.callback"}  # the module whose ``add_to`` registers it

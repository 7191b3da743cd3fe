"""Process: upkeep, one module a duty."""

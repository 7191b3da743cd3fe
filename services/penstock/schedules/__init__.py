"""Cron schedules: expressions, misfire and overlap policy, store, firing, methods."""

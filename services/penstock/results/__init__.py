"""What a report does: success, failure, heartbeat, wait, spawned tasks; answers to waits."""

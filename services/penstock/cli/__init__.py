"""The `penstock` command: one file a group of commands, and what starts a process."""

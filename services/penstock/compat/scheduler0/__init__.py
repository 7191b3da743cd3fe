"""scheduler0's API: jobs, their store, the callback that workers run, and the REST api."""

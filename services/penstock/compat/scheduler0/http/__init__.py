"""scheduler0's REST api."""

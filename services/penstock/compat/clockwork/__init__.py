"""clockwork's API: POST and DELETE /schedule."""

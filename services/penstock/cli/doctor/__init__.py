"""`penstock doctor`: checks of a live setup, each with advice."""

"""Every setting: typed, described, checked at once."""

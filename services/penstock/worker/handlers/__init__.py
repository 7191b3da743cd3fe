"""What users write handlers with: @action, Context, Retry, Fail."""

"""A backend of `django.tasks`, with its worker."""

"""What a worker loads: ``penstock worker --app penstock.contrib.django.worker_app``, with DJANGO_SETTINGS_MODULE set.

Imported, it sets Django up and imports the module ``tasks`` of each installed app, whose tasks and actions register.
"""

import django
from django.apps import apps
from django.utils.module_loading import autodiscover_modules

if not apps.ready:
    django.setup()
autodiscover_modules("tasks")

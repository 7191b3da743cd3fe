"""Made-up objects to export."""

from __future__ import annotations

import random
from typing import Any

# Non-ASCII letters are capitals already, for not every locale of a database can raise small ones.
_NAMES = ("amber kettle", "birch table", "cobalt lamp", "dune carpet", "Élan chair", "fjord blanket", "Ångström scale")
_COUNTRIES = ("AT", "BR", "CA", "DE", "EE", "FR", "GB", "IN", "JP", "KE", None)


def made_up(object_id: int, seed: int) -> dict[str, Any]:
    """The data of an invented order; the same for the same id and seed."""
    chance = random.Random(f"{seed}/{object_id}")
    return {
        "name": f"{chance.choice(_NAMES)} #{object_id}",
        "country": chance.choice(_COUNTRIES),
        "tags": chance.sample(("gift", "express", "returned", "b2b"), chance.randrange(3)),
        "items": [
            {
                "sku": f"{chance.randrange(16**6):06X}",
                "quantity": chance.randint(1, 9),
                "price_cents": chance.randint(99, 99_999),
            }
            for _ in range(chance.randint(1, 6))
        ],
    }

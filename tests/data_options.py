"""Options of the data component `text` from values, as a configuration makes them."""

import json
from collections.abc import Mapping
from typing import Any

from pretrax.data.options import kind_of


def data_options(values: Mapping[str, Any], *, strict: bool = False) -> Any:
    kind = kind_of(values)
    return kind.model_validate_json(json.dumps(values), strict=True) if strict else kind.model_validate(values)

"""How deeply JSON may nest: what walks through it later is recursive."""

from __future__ import annotations

from typing import Any

MOST = 64
ERROR = f'nested too deeply; use at most {MOST} levels'


def too_deep(value: Any) -> bool:
  """Whether a JSON value has more than `MOST` levels of lists and objects."""
  level = [value]
  for _ in range(MOST):
    level = [
        inner
        for x in level
        if isinstance(x, (dict, list))
        for inner in (x.values() if isinstance(x, dict) else x)
    ]
  return any(isinstance(x, (dict, list)) for x in level)

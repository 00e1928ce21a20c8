"""Positions of published models: how a config.json says that they rotate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from composer_jax import config
from composer_jax import rope

PLACES = (
    *('rope_parameters', 'rope_scaling', 'rope_theta', 'rope_interleave'),
)


def get(fields: Mapping[str, Any], name: str, *default: Any) -> Any:
  """A field; the default if it is null, without one a ValueError."""
  value = fields.get(name)
  if value is None and not default:
    raise ValueError(f'config.json: has no {name}')
  return default[0] if value is None else value


def check_numbers(fields: Mapping[str, Any], names: Iterable[str]) -> None:
  """Refuses what is no number."""
  for name in names:
    value = fields.get(name)
    if value is not None and type(value) not in (int, float):
      raise ValueError(f'config.json: {name}={value!r}: want a number')


def angles_of(fields: Mapping[str, Any]) -> dict[str, Any]:
  """How positions rotate, said in one place or in two that agree."""
  found = []
  for name in ('rope_parameters', 'rope_scaling'):
    angles = fields.get(name)
    if angles is None or angles == {}:
      continue
    if not isinstance(angles, dict) or any(
        isinstance(x, (dict, list)) for x in angles.values()
    ):
      raise ValueError(
          f'config.json: {name}={angles!r}: only one object of numbers for all'
          ' layers is supported'
      )
    angles = {k: x for k, x in angles.items() if x is not None}
    kinds = {angles.pop(k) for k in ('rope_type', 'type') if k in angles}
    if len(kinds) > 1:
      raise ValueError(f'config.json: {name}: rope_type and type differ')
    found.append({'rope_type': next(iter(kinds), 'default'), **angles})
  for angles in found:  # the old place of the base is beside it
    if fields.get('rope_theta') is not None:
      angles.setdefault('rope_theta', fields['rope_theta'])
    if angles.get('rope_theta') != fields.get(
        'rope_theta', angles.get('rope_theta')
    ):
      raise ValueError(
          f'config.json: rope_theta={fields["rope_theta"]!r}, but'
          f' {angles["rope_theta"]!r} beside rope_type; remove one'
      )
  if len(found) == 2:
    base = {k: a[k] for a in found for k in ('rope_theta',) if k in a}
    if {**base, **found[0]} != {**base, **found[1]}:
      raise ValueError(
          'config.json: rope_parameters and rope_scaling differ; remove one'
      )
    return {**base, **found[0]}
  return found[0] if found else {}


def scaling_of(
    fields: Mapping[str, Any], angles: Mapping[str, Any]
) -> rope.Yarn | rope.Llama3 | None:
  """What `angles_of` says of longer windows than the trained ones."""
  kind = angles.get('rope_type', 'default')
  if kind not in ('default', *_SCALINGS):
    raise ValueError(
        f'config.json: rope_type={kind!r} is not supported, only "default",'
        f' {", ".join(map(repr, _SCALINGS))}'
    )
  names = _SCALINGS[kind][1] if kind != 'default' else ()
  numbers = ('rope_theta', 'factor', 'original_max_position_embeddings')
  known = {'rope_type', 'rope_theta', *(names and numbers), *names}
  unused = sorted(angles.keys() - known)
  if kind == 'default' and angles.get('partial_rotary_factor') == 1:
    unused.remove('partial_rotary_factor')
  if unused:
    raise ValueError(
        f'config.json: rope_type={kind!r} does not use {", ".join(unused)};'
        ' not supported'
    )
  check_numbers(angles, [n for n in known - {'rope_type', 'truncate'}])
  if kind == 'default':
    return None
  window = get(fields, 'max_position_embeddings')
  tokens = angles.get('original_max_position_embeddings')
  factor = get(angles, 'factor', *([window / tokens] if tokens else []))
  tokens = tokens or window
  of, names = _SCALINGS[kind]
  more = {n: angles[n] for n in names if angles.get(n) is not None}
  real = {n: x if isinstance(x, bool) else float(x) for n, x in more.items()}
  return of(float(factor), tokens, **real)


# rope_type -> its class, and the fields that have the same names there.
_SCALINGS = {
    'yarn': (
        rope.Yarn,
        (
            'beta_fast',
            'beta_slow',
            'truncate',
            'mscale',
            'mscale_all_dim',
            'attention_factor',
        ),
    ),
    'llama3': (rope.Llama3, ('low_freq_factor', 'high_freq_factor')),
}


def to_fields(cfg: config.ModelConfig) -> dict[str, Any]:
  """What `angles_of` reads."""
  scaling = cfg.rope_scaling
  for kind, (of, names) in _SCALINGS.items():
    if isinstance(scaling, of):
      more = {n: getattr(scaling, n) for n in names}
      # Nothing is not the same as null there.
      more = {n: x for n, x in more.items() if x is not None}
      return {
          'rope_type': kind,
          'type': kind,
          'rope_theta': cfg.rope_theta,
          'factor': scaling.factor,
          'original_max_position_embeddings': scaling.original_tokens,
          **more,
      }
  return {'rope_type': 'default', 'rope_theta': cfg.rope_theta}

"""The Jinja environment that chat templates are written for."""

from __future__ import annotations

import functools
import json

import jinja2
from jinja2 import ext
from jinja2 import sandbox

# What a template gets in any case.
GIVEN = frozenset({'messages', 'tools', 'documents', 'add_generation_prompt'})


class _Generation(ext.Extension):
  """`{% generation %}`, with which some templates mark replies."""

  tags = {'generation'}

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def _refuse(message: str):
  raise jinja2.TemplateError(message)


def _to_json(
    x, ensure_ascii=False, indent=None, separators=None, sort_keys=False
):
  # Not HTML, which is what Jinja's own filter escapes for.
  return json.dumps(
      x,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
  )


@functools.lru_cache(8)
def compiled(template: str) -> jinja2.Template:
  """Compiles a template in the environment that it is written for.

  See https://huggingface.co/docs/transformers/chat_templating_writing.
  """
  environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[_Generation, ext.loopcontrols],
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _refuse
  try:
    return environment.from_string(template)
  except jinja2.TemplateSyntaxError as e:
    raise ValueError(f'chat template, line {e.lineno}: {e.message}') from e

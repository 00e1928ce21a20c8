"""Requests of the OpenAI API, checked; and what is answered to bad ones.

A request that asks for what this server does not do is refused by name rather
than answered with something else. Rollouts that are trained on sample at
temperature 1 with seeds of their own, whatever the request says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
from typing import Any, TypeVar

from composer_jax.chat import messages as messages_lib
from composer_jax.rollout import slots
from composer_jax.serving import api_errors
from composer_jax.serving import depth

_T = TypeVar('_T')

# Fields of `slots.Shaping` -> their names, lowest and highest values.
_SHAPING = {
    'top_p': ('top_p', 1e-6, 1),
    'top_k': ('top_k', -1, 2**24),
    'min_p': ('min_p', 0, 1),
    'frequency': ('frequency_penalty', -2, 2),
    'presence': ('presence_penalty', -2, 2),
    'repetition': ('repetition_penalty', 0.01, 100),
}
_SAMPLING = (*(name for name, _, _ in _SHAPING.values()), 'logit_bias')
_NEUTRAL = {
    'best_of': (1,),
    'echo': (False,),
    'logit_bias': ({},),
    'suffix': ('',),
    'top_logprobs': (0,),
}
_IGNORED = (
    *('metadata', 'prompt_cache_key', 'safety_identifier', 'service_tier'),
    *('reasoning_effort', 'store', 'user', 'verbosity'),
)
# No text of ours has more characters per token. Encoding takes time and memory
# by the character, so what cannot fit is refused before it.
_CHARS_PER_TOKEN = 16
_STOP_CHARS = 1000


@dataclasses.dataclass(frozen=True)
class Form:
  """What a reply has to be.

  Attributes:
    param: field of the request that says so.
    schema: JSON schema of the whole reply; None for a call of a tool.
    tools: tools of which one is to be called.
  """

  param: str
  schema: Mapping[str, Any] | None = None
  tools: tuple[Mapping[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Ask:
  """A valid request.

  Attributes:
    messages: messages of a chat, contents as text; None for a completion.
    tools: tools on offer.
    prompt: prompt of a plain completion: text, or token ids.
    max_tokens: None for as many as fit.
    stop: strings that end a reply and do not belong to it.
    shaping: cuts and penalties of a call that is not trained on.
    template_kwargs: variables for the chat template.
    form: what the reply of a call that is not trained on has to be.
    parallel: whether more than the first of several tool calls is shown.
  """

  model: str
  messages: tuple[Mapping[str, Any], ...] | None = None
  tools: tuple[Mapping[str, Any], ...] = ()
  prompt: str | tuple[int, ...] = ''
  max_tokens: int | None = None
  n: int = 1
  temperature: float = 1.0
  seed: int | None = None
  stop: tuple[str, ...] = ()
  shaping: slots.Shaping | None = None
  template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  form: Form | None = None
  parallel: bool = True
  stream: bool = False
  include_usage: bool = False
  logprobs: bool = False
  return_token_ids: bool = False
  return_routed_experts: bool = False
  routed_experts_start_len: int = 0

  @property
  def setting(self) -> list[Any]:
    """What the template is given besides the messages, for their identity."""
    options = dict(self.template_kwargs)
    return [*self.tools, options] if options else list(self.tools)

  @property
  def steered(self) -> bool:
    """Its tokens are not drawn from the policy's own distribution."""
    return self.shaping is not None or self.form is not None


def load(body: bytes) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    ApiError: it is none, nests too deeply, or holds text that is not Unicode.
  """
  try:
    value = json.loads(body)
    json.dumps(value, ensure_ascii=False).encode()  # no lone surrogates
  except RecursionError as e:
    raise api_errors.ApiError(400, f'body: {depth.ERROR}') from e
  except ValueError as e:
    raise api_errors.ApiError(400, f'body: not valid JSON: {e}') from e
  if not isinstance(value, dict):
    raise api_errors.ApiError(
        400, f'body: a JSON {type(value).__name__}; want an object'
    )
  for name, field in value.items():
    if depth.too_deep(field):
      raise api_errors.ApiError(400, f'{name}: {depth.ERROR}', param=name)
  return value


def check_size(ask: Ask, context_tokens: int) -> None:
  """Refuses a prompt that cannot fit, before anything is done by its length.

  Raises:
    ApiError: it has more characters, or ids, than any that fits.
  """
  plain = ask.messages is None
  size = len(ask.prompt) if plain else _chars([*ask.messages, *ask.setting])
  ids = plain and not isinstance(ask.prompt, str)
  most = context_tokens * (1 if ids else _CHARS_PER_TOKEN)
  if size > most:
    unit = 'tokens' if ids else 'characters'
    raise api_errors.ApiError(
        400,
        f'prompt: {size} {unit}; must be at most {most}, as the context holds'
        f' {context_tokens} tokens',
        param='prompt' if plain else 'messages',
        code='context_length_exceeded',
    )


def _chars(value: Any) -> int:
  """Characters of all strings in a JSON value."""
  if isinstance(value, Mapping):
    return sum(len(k) + _chars(v) for k, v in value.items())
  if isinstance(value, list):
    return sum(map(_chars, value))
  return len(value) if isinstance(value, str) else 0


class _Fields:
  """Takes the fields of a request one by one; null is absent."""

  def __init__(self, body: Mapping[str, Any]):
    self._left = {k: v for k, v in body.items() if v is not None}

  def take(self, name: str, kind: type | tuple[type, ...], default: Any):
    value = self._left.pop(name, default)
    number = isinstance(value, bool) and kind is not bool
    if value is not default and (not isinstance(value, kind) or number):
      raise _refusal(name, value, f'want {_name(kind)}')
    return value

  def count(self, name: str, least: int, default: int | None) -> Any:
    value = self.take(name, int, default)
    if value is not None and not least <= value < 2**63:
      raise _refusal(name, value, f'must be at least {least}')
    return value

  def neutral(self, name: str, allowed: Sequence[Any]) -> None:
    value = self._left.pop(name, allowed[0])
    if value not in allowed:
      cure = ' or '.join(json.dumps(a) for a in allowed)
      raise _refusal(name, value, f'not supported; leave it out or use {cure}')

  def drop(self, *names: str) -> None:
    for name in names:
      self._left.pop(name, None)

  def end(self) -> None:
    for name, value in self._left.items():
      raise _refusal(name, value, 'unknown field; leave it out')


def _refusal(name: str, value: Any, why: str) -> api_errors.ApiError:
  shown = json.dumps(value)
  shown = shown if len(shown) <= 60 else shown[:57] + '...'
  return api_errors.ApiError(400, f'{name}={shown}: {why}', param=name)


def _name(kind: type | tuple[type, ...]) -> str:
  names = {
      dict: 'an object',
      list: 'a list',
      str: 'a string',
      int: 'an integer',
  }
  kinds = kind if isinstance(kind, tuple) else (kind,)
  return ' or '.join(names.get(k, k.__name__) for k in kinds)


def parse(body: Mapping[str, Any], *, chat: bool, train: bool) -> Ask:
  """Checks a request for a completion.

  Args:
    body: the JSON.
    chat: whether it comes with messages, not with a prompt.
    train: whether sampling parameters are overruled.

  Raises:
    ApiError: names the field, its value and the cure.
  """
  fields = _Fields(body)
  fields.drop(*_IGNORED)
  if train:
    fields.drop(*_SAMPLING, 'temperature', 'seed')
  temperature = fields.take('temperature', (int, float), 1.0)
  if not 0 <= temperature <= 100:  # NaN is neither
    raise _refusal('temperature', temperature, 'must be in [0, 100]')
  n = fields.count('n', 1, 1)
  if n > (1 if train else 128):
    most = '1 where rollouts are trained on' if train else '128'
    raise _refusal('n', n, f'must be at most {most}')
  options = _Fields(fields.take('stream_options', dict, {}))
  seed = fields.take('seed', int, None)
  common = dict(
      model=fields.take('model', str, ''),
      max_tokens=_max_tokens(fields),
      n=n,
      temperature=float(temperature),
      seed=seed,
      stop=_stop(fields),
      shaping=_shaping(fields),
      parallel=fields.take('parallel_tool_calls', bool, True),
      stream=fields.take('stream', bool, False),
      include_usage=options.take('include_usage', bool, False),
      return_token_ids=fields.take('return_token_ids', bool, False),
      return_routed_experts=fields.take('return_routed_experts', bool, False),
      routed_experts_start_len=fields.count('routed_experts_start_len', 0, 0),
  )
  if chat:
    listed = fields.take('messages', list, [])
    messages = _normal(lambda: tuple(map(messages_lib.message, listed)))
    if not messages:
      raise api_errors.ApiError(
          400, 'messages: none; send at least one', param='messages'
      )
    offered = fields.take('tools', (list, str), [])
    tools = _normal(lambda: messages_lib.tools(offered))
    choice = fields.take('tool_choice', (str, dict), 'auto')
    called = _called(choice, tools)
    # A call has a form of its own; that of an answer does not concern it.
    form = _form(fields)
    form = called or form
    if form and train:
      raise _refusal(
          form.param,
          body[form.param],
          'not where rollouts are trained on, which sample freely; leave it out',
      )
    ask = Ask(
        messages=messages,
        tools=() if choice == 'none' else tools,
        form=form,
        template_kwargs=fields.take('chat_template_kwargs', dict, {}),
        logprobs=fields.take('logprobs', bool, False),
        **common,
    )
  else:
    logprobs = fields.take('logprobs', (bool, int), False)
    if logprobs not in (0, 1):
      raise _refusal('logprobs', logprobs, 'must be 0 or 1: chosen tokens only')
    ask = Ask(prompt=_prompt(fields), logprobs=logprobs is not False, **common)
  for name, allowed in _NEUTRAL.items():
    fields.neutral(name, allowed)
  fields.end()
  return ask


def _shaping(fields: _Fields) -> slots.Shaping | None:
  values = {}
  for field, (name, low, high) in _SHAPING.items():
    default = getattr(slots.Shaping(), field)
    kinds = int if isinstance(default, int) else (int, float)
    values[field] = value = fields.take(name, kinds, default)
    if not low <= value <= high:
      raise _refusal(name, value, f'must be in [{low}, {high}]')
  values['top_k'] = max(values['top_k'], 0)  # -1, too, is all
  shaping = slots.Shaping(**values)
  return None if shaping == slots.Shaping() else shaping


def _called(
    choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> Form | None:
  """The form of a reply that has to call a tool, or None."""
  if choice in ('auto', 'none'):
    return None
  if choice == 'required':
    found = tools
  elif isinstance(choice, dict) and choice.get('type') == 'function':
    function = choice.get('function')
    wanted = function.get('name') if isinstance(function, dict) else None
    found = [t for t in tools if t['function']['name'] == wanted]
  else:
    raise _refusal(
        'tool_choice',
        choice,
        'want "auto", "none", "required" or {"type": "function", "function":'
        ' {"name": ...}}',
    )
  if not found:
    names = ', '.join(t['function']['name'] for t in tools) or 'none'
    raise _refusal('tool_choice', choice, f'tools on offer: {names}')
  return Form('tool_choice', tools=tuple(found))


def _form(fields: _Fields) -> Form | None:
  """The form of a reply by `response_format`, or None."""
  wanted = fields.take('response_format', dict, {'type': 'text'})
  kind, schema = wanted.get('type'), wanted.get('json_schema')
  if kind == 'text':
    return None
  if kind == 'json_object':
    return Form('response_format', {'type': 'object'})
  if kind == 'json_schema' and isinstance(schema, dict):
    inner = schema.get('schema', {'type': 'object'})
    if isinstance(inner, dict):
      return Form('response_format', inner)
  raise _refusal(
      'response_format',
      wanted,
      'want {"type": "text"}, {"type": "json_object"} or {"type":'
      ' "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
  )


def _max_tokens(fields: _Fields) -> int | None:
  old = fields.count('max_tokens', 1, None)
  return fields.count('max_completion_tokens', 1, old)


def _stop(fields: _Fields) -> tuple[str, ...]:
  stop = fields.take('stop', (str, list), [])
  stop = [stop] if isinstance(stop, str) else stop
  if len(stop) > 16 or not all(
      isinstance(s, str) and 0 < len(s) <= _STOP_CHARS for s in stop
  ):
    want = f'want up to 16 strings of 1 to {_STOP_CHARS} characters'
    raise _refusal('stop', stop, want)
  return tuple(stop)


def _prompt(fields: _Fields) -> str | tuple[int, ...]:
  prompt = fields.take('prompt', (str, list), '')
  if isinstance(prompt, str):
    return prompt
  if not all(type(i) is int and 0 <= i < 2**31 for i in prompt):
    raise _refusal('prompt', prompt, 'want one text, or one list of token ids')
  return tuple(prompt)


def _normal(read: Callable[[], _T]) -> _T:
  try:
    return read()
  except messages_lib.FieldError as e:
    raise api_errors.ApiError(400, str(e), param=e.param) from e

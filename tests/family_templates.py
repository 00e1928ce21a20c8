"""Chat templates with tools, in the manner of the families that are read."""

import tokenizers

from composer_jax.chat import template as template_lib
from tests import template_test

_HEAD = """\
{%- for t in tools or [] %}{{- '<|im_start|>system\\n' + (t | tojson) + '<|im_end|>\\n' }}{% endfor %}
{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
"""
_FOOT = """
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
XML = f"""{_HEAD}
  {{%- for c in m.tool_calls or [] %}}
    {{{{- '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}}}
    {{%- for k, v in c.function.arguments | items %}}
      {{{{- '<parameter=' + k + '>\\n' }}}}
      {{{{- v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}}}
      {{{{- '\\n</parameter>\\n' }}}}
    {{%- endfor %}}
    {{{{- '</function>\\n</tool_call>' }}}}
  {{%- endfor %}}
{_FOOT}"""
LLAMA = """\
{{- bos_token }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + (tools | tojson) + '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
  {%- if m.tool_calls %}
    {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
    {%- set c = m.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + c.name + '", "parameters": ' }}
    {{- c.arguments | tojson }}{{- '}<|eot_id|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {%- if tools and m == users[-1] %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
    {{- '[INST] ' + m.content + '[/INST]' }}
  {%- elif m.tool_calls is defined and m.tool_calls is not none %}
    {{- '[TOOL_CALLS] [' }}
    {%- for c in m.tool_calls %}
      {{- (c.function | tojson)[:-1] }}
      {%- if c.id is not defined or c.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{% endif %}
      {{- ', "id": "' + c.id + '"}' + ('' if loop.last else ', ') }}
    {%- endfor %}
    {{- ']' + eos_token }}
  {%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
  {%- elif m.role == 'tool' %}
    {%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{% endif %}
    {{- '[TOOL_RESULTS] {"content": ' + m.content + '}[/TOOL_RESULTS]' }}
  {%- endif %}
{%- endfor %}
"""
# Wants arguments as text, and no content beside calls.
DEEPSEEK = """\
{{- bos_token }}{{- (tools | tojson) if tools else '' }}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
  {%- elif m.role == 'assistant' and m.content is none %}
    {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
    {%- for c in m.tool_calls %}
      {{- '\\n' if not loop.first else '' }}
      {{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
    {%- endfor %}
    {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}
  {%- elif m.role == 'tool' %}{{- '<｜tool▁output｜>' + m.content }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{% endif %}
"""
DEEPSEEK_31 = (
    DEEPSEEK.replace("' + c.type + '", "' + c.function.name + '")
    .replace(
        "<｜tool▁sep｜>' + c.function.name + '\\n```json\\n'", "<｜tool▁sep｜>'"
    )
    .replace("'\\n```<｜tool▁call▁end｜>'", "'<｜tool▁call▁end｜>'")
)
FAMILIES = {
    'qwen': (template_test.QWEN, '<|im_end|>'),
    'qwen coder': (XML, '<|im_end|>'),
    'kimi': (template_test.KIMI, '<|im_end|>'),
    'llama': (LLAMA, '<|eot_id|>'),
    'mistral': (MISTRAL, '</s>'),
    'deepseek': (DEEPSEEK, '<｜end▁of▁sentence｜>'),
    'deepseek 3.1': (DEEPSEEK_31, '<｜end▁of▁sentence｜>'),
}
_SPECIAL = (
    *('<|im_start|>', '<|im_end|>', '<|im_user|>', '<|im_assistant|>'),
    *('<|im_system|>', '<|im_middle|>', '<|tool_calls_section_begin|>'),
    *('<|tool_calls_section_end|>', '<|tool_call_begin|>', '<s>', '</s>'),
    *('<|tool_call_argument_begin|>', '<|tool_call_end|>', '<|eot_id|>'),
    *('<|start_header_id|>', '<|end_header_id|>', '[INST]', '[/INST]'),
    *('[TOOL_CALLS]', '[AVAILABLE_TOOLS]', '[/AVAILABLE_TOOLS]'),
    *('[TOOL_RESULTS]', '[/TOOL_RESULTS]', '<｜User｜>', '<｜Assistant｜>'),
    *('<｜tool▁calls▁begin｜>', '<｜tool▁calls▁end｜>', '<｜tool▁sep｜>'),
    *('<｜tool▁call▁begin｜>', '<｜tool▁call▁end｜>', '<｜tool▁output｜>'),
    '<｜end▁of▁sentence｜>',
)


def tokenizer() -> tokenizers.Tokenizer:
  return template_test.byte_level(_SPECIAL, [XML, LLAMA, MISTRAL])


def chat_format(family: str) -> template_lib.ChatFormat:
  template, stop = FAMILIES[family]
  names = {'bos_token': '<s>', 'eos_token': '</s>'}
  return template_lib.ChatFormat(tokenizer(), template, [stop], names)

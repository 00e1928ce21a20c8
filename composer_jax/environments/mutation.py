"""Small faults in python source: where they can be made, and how.

A fault is a replacement of a piece of text, so everything else of the file,
its comments and layout, stays as it was written.
"""

from __future__ import annotations

import ast
import bisect
from collections.abc import Iterator
import dataclasses
import io
import itertools
import tokenize

_SWAPS = {
    'comparison': (
        *(('<', '<='), ('<=', '<'), ('>', '>='), ('>=', '>'), ('==', '!=')),
        *(('!=', '=='), ('is', 'is not'), ('is not', 'is'), ('in', 'not in')),
        ('not in', 'in'),
    ),
    'arithmetic': (
        *(('+', '-'), ('-', '+'), ('*', '+'), ('/', '*'), ('//', '*')),
        *(('%', '//'), ('**', '*'), ('<<', '>>'), ('>>', '<<'), ('|', '&')),
        *(('&', '|'), ('^', '|')),
    ),
    'update': (('+=', '-='), ('-=', '+='), ('*=', '+='), ('//=', '*=')),
    'logic': (('and', 'or'), ('or', 'and')),
}
_OPERATORS = {
    (k, old): new for k, pairs in _SWAPS.items() for old, new in pairs
}
_NAMES = {
    a: b
    for pair in (
        'min max',
        'lower upper',
        'startswith endswith',
        'lstrip rstrip',
        'find rfind',
        'split rsplit',
        'partition rpartition',
        'ljust rjust',
        'any all',
        'append extend',
        'pop popleft',
        'floor ceil',
        'keys values',
        'add discard',
    )
    for a, b in (pair.split(), pair.split()[::-1])
}


@dataclasses.dataclass(frozen=True)
class Fault:
  """A replacement in a text.

  Attributes:
    kind: sort of fault, such as 'comparison'.
    line: number of the line it is in, from 1.
    start: first character replaced.
    end: first character after them.
    new: the text in their place.
  """

  kind: str
  line: int
  start: int
  end: int
  new: str

  def apply(self, source: str) -> str:
    return source[: self.start] + self.new + source[self.end :]


class _Text:
  """Offsets of positions as `ast` and `tokenize` give them."""

  def __init__(self, source: str):
    self.source = source
    self._lines = source.splitlines(keepends=True)
    self._starts = [0, *itertools.accumulate(map(len, self._lines))]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    self.tokens = [
        (self._starts[t.start[0] - 1] + t.start[1], t.string)
        for t in tokens
        if t.type in (tokenize.OP, tokenize.NAME)
    ]

  def at(self, line: int, column: int) -> int:
    """Offset of a position of `ast`, whose columns are UTF-8 bytes."""
    text = self._lines[line - 1].encode()[:column].decode()
    return self._starts[line - 1] + len(text)

  def span(self, node: ast.AST) -> tuple[int, int]:
    return (
        self.at(node.lineno, node.col_offset),
        self.at(node.end_lineno, node.end_col_offset),
    )

  def between(self, left: ast.AST, right: ast.AST) -> tuple[int, int, str]:
    """The operator between two operands: (start, end, text)."""
    low, high = self.span(left)[1], self.span(right)[0]
    inside = slice(
        *(bisect.bisect_left(self.tokens, (x,)) for x in (low, high))
    )
    words = [(a, t) for a, t in self.tokens[inside] if t not in '()']
    if not words:
      return low, low, ''
    start, (last, text) = words[0][0], words[-1]
    return start, last + len(text), ' '.join(t for _, t in words)


def _operands(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
  """Pairs of operands with an operator between them."""
  match node:
    case ast.Compare(left=left, comparators=rest):
      for pair in itertools.pairwise([left, *rest]):
        yield 'comparison', *pair
    case ast.BinOp(left=left, right=right):
      yield 'arithmetic', left, right
    case ast.AugAssign(target=target, value=value):
      yield 'update', target, value
    case ast.BoolOp(values=values):
      for pair in itertools.pairwise(values):
        yield 'logic', *pair


def _replacements(
    node: ast.AST, text: _Text
) -> Iterator[tuple[str, int, int, str]]:
  """(kind, start, end, new text) of the faults at one node."""
  for kind, left, right in _operands(node):
    start, end, old = text.between(left, right)
    if new := _OPERATORS.get((kind, old)):
      yield kind, start, end, new
  match node:
    case ast.UnaryOp(op=ast.Not(), operand=operand):
      yield 'negation', text.span(node)[0], text.span(operand)[0], ''
    case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
      if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        start = text.span(test)[0]
        yield 'negation', start, start, 'not '
    case ast.Constant(value=bool(value)):
      yield 'constant', *text.span(node), str(not value)
    case ast.Constant(value=int(value)) if abs(value) < 1000:
      yield 'constant', *text.span(node), str(value + 1)
    case ast.Return(value=ast.expr() as value):
      if not isinstance(value, ast.Constant):
        yield 'return', *text.span(value), 'None'
    case ast.Attribute(attr=name) if name in _NAMES:
      end = text.span(node)[1]
      yield 'name', end - len(name), end, _NAMES[name]
    case ast.Name(id=name) if name in _NAMES:
      yield 'name', *text.span(node), _NAMES[name]
    case ast.Call(args=[ast.Name() as a, ast.Name() as b], keywords=[]):
      start, end = text.span(a)[0], text.span(b)[1]
      yield 'arguments', start, end, f'{b.id}, {a.id}'
    case ast.Slice(lower=None, upper=ast.expr() as upper, step=None):
      start, end = text.span(upper)
      yield 'slice', start - 1, end, f'{text.source[start:end]}:'


def faults(source: str) -> list[Fault]:
  """Every fault, in the order of the text.

  Raises:
    SyntaxError: the source is no python.
  """
  tree, text = ast.parse(source), _Text(source)
  out = {
      Fault(kind, node.lineno, start, end, new)
      for node in ast.walk(tree)
      for kind, start, end, new in _replacements(node, text)
  }
  return sorted(out, key=lambda f: (f.start, f.end, f.new))


def removals(source: str, least_lines: int = 4) -> list[Fault]:
  """Functions that can be taken out: name, arguments and docstring stay.

  Args:
    source: source of the module.
    least_lines: lines that go at least.
  """
  tree, text = ast.parse(source), _Text(source)
  out = []
  for node in ast.walk(tree):
    if not isinstance(node, ast.FunctionDef) or node.name.startswith('__'):
      continue
    body = node.body[ast.get_docstring(node) is not None :]
    if not body or body[-1].end_lineno - body[0].lineno + 1 < least_lines:
      continue
    start, end = text.span(body[0])[0], text.span(body[-1])[1]
    new = f'raise NotImplementedError({node.name!r})'
    out.append(Fault('removal', body[0].lineno, start, end, new))
  return sorted(out, key=lambda f: f.start)

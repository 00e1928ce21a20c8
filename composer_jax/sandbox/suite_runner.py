"""The program that runs a test suite on a submission, inside a sandbox.

Tests and submission are imported from memory: there is no test file to edit,
to read or to shadow, and no conftest or ini file is looked for. Among the
tests stand canaries, which fail in as many ways as tests can; a submission
that makes failures look like successes makes them succeed, too. Standard
library only: the sandbox gets this file as source text.
"""

import importlib.abc
import importlib.util
import itertools
import json
import os
import random
import sys
import unittest

_FAILED = 'failed'
_PASSED = 'passed'
_FIXTURE = 'fixture'


class _Memory(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
  """Imports modules from texts."""

  def __init__(self, files):
    self._found = {}
    for path, source in files.items():
      if path.endswith('.py'):
        folder, _, name = path[:-3].rpartition('/')
        package = name == '__init__'
        name = folder if package else f'{folder}/{name}'.strip('/')
        self._found[name.replace('/', '.')] = path, source, package

  def names(self):
    return list(self._found)

  def find_spec(self, name, path=None, target=None):
    if name not in self._found:
      return None
    path, _, package = self._found[name]
    spec = importlib.util.spec_from_loader(
        name, self, origin=os.path.abspath(path), is_package=package
    )
    spec.has_location = True  # so that the module has a __file__
    spec.cached = None
    return spec

  def get_source(self, fullname):
    return self._found[fullname][1]


def _text(kind, error):
  try:
    return f'{kind.__name__}: {error}'
  except Exception:  # of the submission's own making
    return kind.__name__


class _Report(unittest.TestResult):
  """Writes a line a test: nonce, id, outcome, what went wrong."""

  def __init__(self, nonce, fd):
    super().__init__()
    self._nonce, self._fd = nonce, fd
    self._write, self._dumps = os.write, json.dumps
    self._outcome = None

  def startTest(self, test):
    self._outcome = None

  def stopTest(self, test):
    self.note(test.id(), *(self._outcome or ('none', '')))

  def note(self, name, outcome, text=''):
    if len(text) > 300:
      text = f'{text[:150]} ... {text[-150:]}'
    line = self._dumps([self._nonce, name, outcome, text]) + '\n'
    self._write(self._fd, line.encode())

  def fixture(self, name, text):
    """Notes why tests did not run, or what went wrong after they had."""
    self.note(name, _FIXTURE, text)

  def _set(self, outcome, error=None):
    if self._outcome is None or outcome == _FAILED:
      self._outcome = outcome, '' if error is None else _text(*error[:2])

  def addSuccess(self, test):
    self._set(_PASSED)

  def addError(self, test, err):
    if isinstance(test, unittest.TestCase):
      self._set(_FAILED, err)
    else:
      self.fixture(test.id(), _text(*err[:2]))

  def addFailure(self, test, err):
    self._set(_FAILED, err)

  def addSubTest(self, test, subtest, err):
    if err is not None:
      self._set(_FAILED, err)

  def addSkip(self, test, reason):
    if isinstance(test, unittest.TestCase):
      self._set('skipped')
    else:
      self.fixture(test.id(), f'skipped: {reason}')

  def addExpectedFailure(self, test, err):
    self._set(_PASSED)

  def addUnexpectedSuccess(self, test):
    self._set(_FAILED)


def _raise(self):
  raise ValueError('canary')


def _subtest(self):
  with self.subTest(k=1):
    self.assertEqual(1, 2)


def _statement(self):
  assert not self


_CANARIES = (
    lambda self: self.assertEqual(1, 2),
    lambda self: self.assertTrue(0),
    lambda self: self.assertFalse(1),
    lambda self: self.assertIs(self, None),
    lambda self: self.assertIn(1, [2]),
    lambda self: self.assertIsInstance(1, str),
    lambda self: self.assertListEqual([1], [2]),
    lambda self: self.assertAlmostEqual(1.0, 2.0),
    lambda self: self.assertRaises(ValueError, int, 1),
    lambda self: self.assertRegex('a', 'b'),
    lambda self: self.fail(),
    _raise,
    _subtest,
    _statement,
)


def _canaries(names, module):
  """A suite per name, each fails in its own way.

  Whatever becomes of the fixtures of their module, these run.
  """
  for k, name in enumerate(names):
    *_, group, method = name.split('.')
    body = {method: _CANARIES[k % len(_CANARIES)], '__module__': module}
    case = type(group, (unittest.TestCase,), body)(method)
    yield [unittest.BaseTestSuite([case])]


def _flat(suite):
  for test in suite:
    if isinstance(test, unittest.TestSuite):
      yield from _flat(test)
    else:
      yield test


def _load(name, report):
  """The tests of a module; none if it cannot be imported."""
  try:
    return unittest.defaultTestLoader.loadTestsFromModule(
        importlib.import_module(name)
    )
  except Exception as e:
    report.fixture(name, _text(type(e), e))
    return unittest.TestSuite()


def main(tests, submission, modules, wanted, canaries, nonce, seed):
  """Runs tests; the report goes to what was the standard output.

  Args:
    tests: path -> text of the tests' modules.
    submission: path -> text of what is tested; tests win.
    modules: names of the modules that hold tests.
    wanted: ids of the tests to run; None for all.
    canaries: ids (module.group.method) of tests that have to fail.
    nonce: first field of every line.
    seed: seed of the places of the canaries.
  """
  report = _Report(nonce, os.dup(1))
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 1)
  os.dup2(null, 2)
  places = random.Random(seed)
  finder = _Memory(submission | tests)
  for name in finder.names():
    sys.modules.pop(name, None)
  sys.meta_path.insert(0, finder)
  found = unittest.TestSuite(_load(name, report) for name in modules)
  cases = [t for t in _flat(found) if wanted is None or t.id() in wanted]
  # Whole classes, so that their fixtures run once.
  groups = [list(g) for _, g in itertools.groupby(cases, key=type)]
  for canary in _canaries(canaries, modules[0]):
    groups.insert(places.randint(0, len(groups)), canary)
  unittest.TestSuite(itertools.chain(*groups)).run(report)
  report.note('', 'end')

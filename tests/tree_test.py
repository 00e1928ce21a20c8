"""What lies in the tree: no leftovers, docstrings that point right, CI files."""

import ast
import contextlib
import fnmatch
import io
import pathlib
import re
import subprocess
import tokenize

from absl.testing import absltest
from tests import layers
import yaml

_LEFTOVERS = (
    *('*.tmp', '.*.tmp', '*.orig', '*.rej', '*.swp', '*.bak', '*~', '*.part'),
)
_MOST_BYTES = 1_000_000
_MACHINE = re.compile('/' + '(work|root)/')
_POINTER = re.compile(r'`(?:composer_jax\.)?([a-z]\w*)\.(\w+)')


def _tracked() -> list[pathlib.Path]:
  """Files of the repository; of an unpacked archive, its modules.

  Raises:
    RuntimeError: there is a repository and nothing that can list it.
  """
  if not (layers.ROOT / '.git').exists():
    return layers.modules()
  # The folder may be somebody else's, as in a container.
  command = ['git', '-c', 'safe.directory=*', 'ls-files', '-z']
  try:
    done = subprocess.run(
        command, cwd=layers.ROOT, capture_output=True, text=True, check=True
    )
  except FileNotFoundError as e:
    raise RuntimeError('.git is here, and no git: install it') from e
  except subprocess.CalledProcessError as e:
    raise RuntimeError(f'{command}: {e.stderr}') from e
  paths = [layers.ROOT / name for name in done.stdout.split('\0') if name]
  return [path for path in paths if path.is_file()]


def _prose(source: str) -> str:
  """Docstrings and comments of a module."""
  found = [
      ast.get_docstring(node) or ''
      for node in ast.walk(ast.parse(source))
      if isinstance(
          node,
          ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
      )
  ]
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  found += [t.string for t in tokens if t.type == tokenize.COMMENT]
  return '\n'.join(found)


def _names() -> dict[str, set[str]]:
  """Package -> its modules, module -> its names; those of one name together."""
  out = {}
  for path in layers.modules():
    out.setdefault(path.parent.name, set()).add(path.stem)
    own = re.findall(
        r'^(?:class |def |async def |)(\w+)', path.read_text(), re.MULTILINE
    )
    out.setdefault(path.stem, set()).update(own)
  return out


class TreeTest(absltest.TestCase):

  def test_no_leftovers(self):
    files = _tracked()
    self.assertGreater(len(files), 100)
    left = lambda name: any(fnmatch.fnmatch(name, p) for p in _LEFTOVERS)
    self.assertTrue(left('x_test.py.0123.tmp'))
    self.assertEmpty([path for path in files if left(path.name)])
    large = [path for path in files if path.stat().st_size > _MOST_BYTES]
    self.assertEmpty(large)

  def test_leftovers_are_ignored(self):
    ignored = (layers.ROOT / '.gitignore').read_text().splitlines()
    self.assertContainsSubset(_LEFTOVERS, ignored)

  def test_no_path_of_one_machine(self):
    self.assertRegex('/ro' + 'ot/x', _MACHINE)
    found = []
    for path in _tracked():
      with contextlib.suppress(UnicodeDecodeError):  # not text
        if _MACHINE.search(path.read_text('utf-8')):
          found.append(path)
    self.assertEmpty(found)

  def test_docstrings_point_at_what_is_there(self):
    known = _names()
    packages = {path.parent.name for path in layers.modules()}
    source = (layers.ROOT / 'composer_jax' / 'config.py').read_text()
    fields = set(re.findall(r'^  (\w+):', source, re.MULTILINE))
    seen, wrong = 0, []
    for path in layers.modules():
      for owner, name in _POINTER.findall(_prose(path.read_text())):
        # What is in scope where it is said looks the same, but for modules and
        # classes: a value's field, and a field of the config (`model.layers`).
        if owner == 'jax' or not (owner in packages or name[0].isupper()):
          continue
        if owner in fields and (name in fields or name.isdigit()):
          continue
        seen += 1
        if name not in known.get(owner, ()):
          wrong.append(f'{path}: {owner}.{name}')
    self.assertEmpty(wrong)
    self.assertGreater(seen, 30)


class CiFilesTest(absltest.TestCase):

  def _workflow(self, name):
    """(events, commands) of a workflow."""
    path = layers.ROOT / '.github' / 'workflows' / f'{name}.yml'
    found = yaml.load(path.read_text(), yaml.BaseLoader)  # `on` is no bool
    (job,) = found['jobs'].values()
    return found['on'], [s['run'] for s in job['steps'] if 'run' in s]

  def test_every_push_is_checked(self):
    events, commands = self._workflow('ci')
    self.assertCountEqual(events, ['push', 'pull_request'])
    self.assertEqual(commands, ['bash .ci/run'])

  def test_the_long_tests_run_on_a_schedule(self):
    events, commands = self._workflow('nightly')
    self.assertCountEqual(events, ['schedule', 'workflow_dispatch'])
    (schedule,) = events['schedule']
    self.assertRegex(schedule['cron'], r'^\d+ \d+ \* \* \*$')
    self.assertEqual(commands, ['bash .ci/run --nightly'])

  def test_hooks_are_what_ci_lints(self):
    script = (layers.ROOT / '.ci' / 'run').read_text()
    section = re.search(r"^section 'Lint.*\n((?:.+\n)+)", script, re.MULTILINE)
    config = (layers.ROOT / '.pre-commit-config.yaml').read_text()
    (repo,) = yaml.safe_load(config)['repos']
    self.assertEqual(repo['repo'], 'local')
    hooks = repo['hooks']
    self.assertEqual([h['entry'] for h in hooks], section[1].splitlines())
    for hook in hooks:
      self.assertFalse(hook['pass_filenames'])
      self.assertEqual(hook['language'], 'system')


if __name__ == '__main__':
  absltest.main()

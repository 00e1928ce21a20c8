"""BUILD says what is on disk: every file, with the imports it really has."""

from absl.testing import absltest
from tests import build
from tests import layers


def _evaluated(text):
  """Runs BUILD, which is Python as well; returns the targets it declares."""
  made = []

  def rule(**fields):
    made.append(fields)

  nothing = lambda *args, **kwargs: []
  names = ('load', 'package', 'licenses', 'exports_files', 'glob')
  rules = ('py_binary', 'py_library', 'py_test')
  exec(text, dict.fromkeys(names, nothing) | dict.fromkeys(rules, rule))
  return made


class BuildTest(absltest.TestCase):

  def test_is_what_the_command_writes(self):
    self.assertEqual(
        build.FILE.read_text(), build.render(), 'python3 -m tests.build'
    )

  def test_every_module_is_in_one_target(self):
    # Read from the text, so that a fault of the renderer shows.
    made = _evaluated(build.FILE.read_text())
    srcs = [path for target in made for path in target['srcs']]
    self.assertLen(set(srcs), len(srcs), 'a file is in two targets')
    names = [target['name'] for target in made]
    self.assertLen(set(names), len(names), 'two targets share a name')
    tests = (layers.ROOT / 'tests').rglob('*.py')
    files = {str(f.relative_to(layers.ROOT)) for f in tests}
    files |= {str(f.relative_to(layers.ROOT)) for f in layers.modules()}
    plugins = {'tests/kernels/conftest.py'}  # of pytest, which Bazel is not
    self.assertEqual(set(srcs), files - plugins)

  def test_every_dependency_is_a_target_or_declared_in_setup(self):
    made = _evaluated(build.FILE.read_text())
    setup = (layers.ROOT / 'setup.py').read_text().lower().replace('-', '_')
    libraries = {t['name'] for t in made}
    for target in made:
      for dep in target.get('deps', []):
        own, package = dep[1:], dep.removeprefix('@pypi//')
        known = own in libraries if dep[0] == ':' else package in setup
        self.assertTrue(known, f'{target["name"]}: {dep}')


if __name__ == '__main__':
  absltest.main()

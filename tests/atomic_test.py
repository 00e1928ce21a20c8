"""A file or folder is there as a whole or not at all, whatever ends a writer."""

import pathlib
import signal
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from composer_jax import atomic

_SIZE = 1 << 20
# Writes a file again and again, as a whole of one letter at a time.
_WRITER = f"""
import itertools, pathlib, sys
from composer_jax import atomic
for letter in itertools.cycle(sys.argv[2]):
  atomic.write(pathlib.Path(sys.argv[1]), letter * {_SIZE})
  print(letter, flush=True)
"""
# Dies with the folder half full.
_FILLER = """
import os, pathlib, signal, sys
from composer_jax import atomic
with atomic.new_folder(pathlib.Path(sys.argv[1])) as part:
  (part / 'first').write_text('half')
  os.kill(os.getpid(), signal.SIGKILL)
"""


class AtomicTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.folder / 'a.json'

  def _names(self):
    return sorted(p.name for p in self.folder.iterdir())

  @parameterized.parameters('tëxt\n', b'\x00\xff')
  def test_writes_what_it_is_given(self, data):
    self.path.write_text('something longer that was there before')
    atomic.write(self.path, data)
    want = data.encode() if isinstance(data, str) else data
    self.assertEqual(self.path.read_bytes(), want)
    self.assertEqual(self._names(), ['a.json'])

  def test_a_file_has_the_rights_of_any_other(self):
    atomic.write_json(self.path, {'a': [1, None]})
    self.assertEqual(
        self.path.read_text(), '{\n  "a": [\n    1,\n    null\n  ]\n}\n'
    )
    other = self.folder / 'other'
    other.touch()
    self.assertEqual(self.path.stat().st_mode, other.stat().st_mode)

  def test_a_failed_write_leaves_the_old_content_and_nothing_else(self):
    atomic.write(self.path, 'old')
    with self.assertRaises(UnicodeEncodeError):
      atomic.write(self.path, '\ud800')
    with self.assertRaises(TypeError):
      atomic.write_json(self.path, {'a': object()})
    self.assertEqual(self.path.read_text(), 'old')
    taken = self.folder / 'taken'
    taken.mkdir()
    with self.assertRaises(OSError):  # after every byte was written
      atomic.write(taken, 'new')
    self.assertEqual(self._names(), ['a.json', 'taken'])

  def test_two_writers_and_a_kill(self):
    writers = [
        subprocess.Popen(
            [sys.executable, '-c', _WRITER, self.path, letters],
            cwd=pathlib.Path(__file__).parents[1],
            stdout=subprocess.PIPE,
        )
        for letters in ('ab', 'cd')
    ]
    try:
      for writer in writers:
        writer.stdout.readline()
      for _ in range(200):
        text = self.path.read_text()
        self.assertEqual(text, text[0] * _SIZE)
    finally:
      for writer in writers:
        writer.kill()
        writer.communicate()
    text = self.path.read_text()
    self.assertEqual(text, text[0] * _SIZE)

  def test_a_folder_is_whole_or_absent(self):
    path = self.folder / 'in' / 'made'
    with self.assertRaises(KeyError), atomic.new_folder(path) as part:
      (part / 'first').write_text('half')
      raise KeyError
    self.assertEmpty(list(path.parent.iterdir()))
    done = subprocess.run(
        [sys.executable, '-c', _FILLER, path],
        cwd=pathlib.Path(__file__).parents[1],
        check=False,
    )
    self.assertEqual(done.returncode, -signal.SIGKILL)
    self.assertFalse(path.exists())
    with atomic.new_folder(path) as part:
      (part / 'second').write_text('whole')
      self.assertFalse(path.exists())
    self.assertEqual([p.name for p in path.parent.iterdir()], ['made'])
    self.assertEqual([p.name for p in path.iterdir()], ['second'])


if __name__ == '__main__':
  absltest.main()

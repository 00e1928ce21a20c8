"""What is said of a published model: figures by hand, one line for bad input."""

import io
import pathlib
import re
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
from rich import console
from rich import filesize
from tests import published

from composer_jax import config
from composer_jax.inspect import model_facts
from composer_jax.model import params


def _inspect(folder, *arguments):
  done = subprocess.run(
      [
          *(sys.executable, '-m', 'experiments.inspect', 'model'),
          f'--path={folder}',
          *arguments,
      ],
      cwd=pathlib.Path(__file__).parents[1],
      capture_output=True,
      text=True,
  )
  return done.returncode, done.stdout, done.stderr


def _text(folder, mesh):
  out = console.Console(file=io.StringIO(), width=160)
  for part in model_facts.of_folder(folder, mesh):
    out.print(part)
  return ' '.join(out.file.getvalue().split())


class ModelFactsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / 'model'
    published.write(self.folder)

  def test_figures(self):
    text = _text(self.folder, config.MeshConfig(data=2))
    total, active = params.count(published.MODEL)
    # Two layers without two of four experts: 2 x 2 x (3 x 32 x 16).
    self.assertEqual(total - active, 2 * 2 * 3 * 32 * 16)
    for want in (
        'family qwen3_moe',
        f'{total:,}, {active:,} active per token',
        '4 of width 16, 2 per token',
        'router softmax, gates renormalised',
        'rope theta 10000, not scaled',
        'layers/moe/w_in 2 x 4 x 32 x 2 x 16 8.19k',
        # Keys and values of two heads of 8 in two layers, f32.
        f'its cache {2 * 2 * 2 * 8 * 4} bytes per token',
        'ends of a reply <|im_end|>',
        'lossless',
        'tasks can be played',
    ):
      self.assertIn(want, text)

  def test_a_mesh_divides_what_it_splits(self):
    whole = 4 * params.count(published.MODEL)[0]
    self.assertIn(
        f'masters, f32 {filesize.decimal(whole)}',
        _text(self.folder, config.MeshConfig(data=2)),
    )
    text = _text(self.folder, config.MeshConfig(fsdp=2, expert=4, data=1))
    masters, moments = (
        1e3 * float(re.search(rf'{name} ([\d.]+) kB', text)[1])
        for name in ('masters, f32', 'AdamW')
    )
    self.assertBetween(masters, whole / 8, whole / 2)
    self.assertAlmostEqual(moments / masters, 2, delta=0.01)

  @parameterized.parameters(
      (['--mesh=expert=3'], 'mesh.expert=3: must divide experts=4'),
      (['--mesh=rows=3'], "'rows'"),
      (['--mesh=fsdp=0'], 'must be at least 1'),
  )
  def test_bad_mesh(self, flags, want):
    code, _, err = _inspect(self.folder, *flags)
    self.assertEqual(code, 2)
    self.assertIn(want, err)
    self.assertLen(err.strip().splitlines(), 1)

  def test_a_damaged_file_is_named(self):
    file = self.folder / 'model.safetensors'
    file.write_bytes(file.read_bytes()[:-5])
    code, out, err = _inspect(self.folder)
    self.assertEqual((code, out), (2, ''))
    self.assertIn('model.safetensors: missing or damaged', err)


if __name__ == '__main__':
  absltest.main()

"""`inspect` from the command line, on real files."""

import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
from composer_jax import config
from composer_jax.dashboard import plots
from composer_jax.inspect import stored_weights
from composer_jax.inspect import tables
from composer_jax.sandbox import box
from composer_jax.weights import publish
from composer_jax.weights import records
import ml_dtypes
import numpy as np
from rich import console
from tests import plots_text
from tests import sample_run
import tokenizers
from tokenizers import models

_ROOT = pathlib.Path(__file__).parents[1]


def _inspect(*arguments) -> subprocess.CompletedProcess:
  command = [sys.executable, '-m', 'experiments.inspect', *map(str, arguments)]
  return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)


def _show(*parts) -> str:
  out = console.Console(width=160, markup=False)
  with out.capture() as capture:
    for part in parts:
      out.print(part)
  return capture.get()


def _publish(folder: pathlib.Path) -> list[publish.Published]:
  """Versions 0 to 3; each changes 10 of 1000 values of one array."""
  rng = np.random.default_rng(0)
  named = {
      name: rng.standard_normal(1_000).astype(ml_dtypes.bfloat16)
      for name in ('a', 'b')
  }
  cfg = config.WeightsConfig(tile_elements=1_000)
  publisher = publish.Publisher(folder.as_uri() + '/', cfg, 'test')
  out = [publisher.publish(0, named)]
  for step in (1, 2, 3):
    words = named['a'].view(np.uint16).copy()
    words[rng.choice(1_000, 10, False)] += 1
    named = named | {'a': words.view(ml_dtypes.bfloat16)}
    out.append(publisher.publish(step, named))
  return out


class InspectTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def test_run_prints_result_and_builds_the_report(self):
    sample_run.write(self.folder, steps=3)
    out = _inspect('run', f'--workdir={self.folder}')
    self.assertEqual(out.returncode, 0, out.stderr)
    self.assertRegex(out.stdout, r'Held-out tasks, sampled +0\.140 +0\.570')
    self.assertRegex(out.stdout, r'Digest mismatches +0 +ok')
    self.assertTrue((self.folder / 'report.html').exists())

  def test_run_marks_a_broken_claim(self):
    sample_run.write(self.folder, steps=3)
    path = self.folder / 'summary.json'
    text = path.read_text().replace(
        '"digest_mismatches": 0', '"digest_mismatches": 2'
    )
    path.write_text(text)
    text = _show(*tables.run(self.folder))
    self.assertRegex(text, r'Digest mismatches +2 +FAILED')

  def test_weights_lists_what_was_published(self):
    published = _publish(self.folder)
    text = _show(stored_weights.versions(str(self.folder), verify=True))
    rows = [r.split() for r in text.splitlines() if r.strip().endswith('ok')]
    self.assertEqual(
        [r[:3] for r in rows],
        [
            ['0', '0', '-'],
            ['1', '1', '0'],
            ['2', '2', '1'],
            ['3', '3', '2'],
        ],
    )
    self.assertEqual([r[3] for r in rows], ['base'] + ['0.50%'] * 3)
    self.assertIn('E 50%, same 50%', text)
    for row, p in zip(rows, published, strict=True):
      self.assertEqual(row[-2], p.version.digest[:12])

  def test_weights_verify_finds_a_flipped_bit(self):
    _publish(self.folder)
    (segment,) = self.folder.glob('d/1-2/*.seg.0')
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    stored_weights.versions(str(self.folder))  # not looked at
    with self.assertRaisesRegex(records.StoreError, '1-2'):
      stored_weights.versions(str(self.folder), verify=True)
    out = _inspect('weights', f'--store={self.folder}', '--verify')
    self.assertEqual(out.returncode, 1)
    self.assertIn('damaged store', out.stderr)
    self.assertLen(out.stderr.splitlines(), 1)

  def test_weights_diff_counts_steps_and_plots_them(self):
    _publish(self.folder)
    plot = self.folder / 'diff.png'
    out = _inspect(
        *('weights', f'--store={self.folder}', '--diff', '1', '3'),
        f'--plot={plot}',
    )
    self.assertEqual(out.returncode, 0, out.stderr)
    self.assertRegex(out.stdout, r' a +1,000 +[12]\.\d00% ')
    self.assertRegex(out.stdout, r' b +1,000 +0\.000% +- +-')
    self.assertEqual(plot.read_bytes()[:8], b'\x89PNG\r\n\x1a\n')
    drawn = plots_text.of(
        lambda path: stored_weights.change_plot(
            path, stored_weights.changes(str(self.folder), 1, 3), '1 to 3'
        )
    )
    self.assertContainsSubset(
        {'1 to 3: changed values', 'a', 'b', '0.00%'}, drawn
    )
    out = _inspect('weights', f'--store={self.folder}', '--diff', '1', '9')
    self.assertEqual(out.returncode, 1)
    self.assertIn('version 9', out.stderr)

  def test_curves_group_runs_by_their_names(self):
    runs = [self.folder / name for name in ('base-0', 'base-1', 'other')]
    for run in runs:
      run.mkdir()
      sample_run.write(run, steps=40)
    names = f'--runs={",".join(map(str, runs))}'
    plot = self.folder / 'curves.png'
    out = _inspect('curves', names, f'--plot={plot}')
    self.assertEqual(out.returncode, 0, out.stderr)
    ((_, y),) = tables.arms(runs, 'eval/pass1_sampled')['other']
    first, last = (rf'0\.{1000 * v:03.0f}' for v in (y[0], y[-1]))
    self.assertNotEqual(first, last)
    both = rf'base +2 +{first} {first} +{last} {last} +{first} +{last}'
    self.assertRegex(out.stdout, both)
    self.assertRegex(out.stdout, rf'other +1 +{first} +{last} +{first}')
    self.assertEqual(plot.read_bytes()[:4], b'\x89PNG')
    arms = tables.arms(runs, 'reward/mean')
    words = plots_text.of(
        lambda path: plots.curves(path, 'title', ('x', 'y'), arms)
    )
    self.assertLessEqual({'title', 'x', 'y', 'base, 2 runs', 'other'}, words)
    with self.assertRaisesRegex(ValueError, 'near it: reward/mean'):
      tables.arms(runs, 'reward/men')

  def test_trajectory_by_task(self):
    sample_run.write(self.folder, steps=1)
    vocab = {chr(i): i for i in range(128)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.save(str(self.folder / 'tokenizer.json'))
    out = _inspect('trajectory', f'--workdir={self.folder}', '--task=r0/7/2')
    self.assertEqual(out.returncode, 0, out.stderr)
    tokens = sample_run.trajectory(2).segments[0].tokens
    chars = ''.join(map(chr, tokens))
    text = f'{chars[:16]}⟨v3⟩{chars[16:20]}⟨v4⟩{chars[20:]}'
    self.assertIn(text, out.stdout)
    self.assertRegex(out.stdout, r'hidden_tests +1')

  def test_trajectory_tokens_show_experts_and_blanks(self):
    sample_run.write(self.folder, steps=1)
    path = tables.find(self.folder, 'r0/7/0')
    text = _show(*tables.trajectory(path, tokens=True))
    first = sample_run.trajectory(0).segments[0].routing.experts[0].tolist()
    row = ' | '.join(f'{a} {b}' for a, b in first)
    self.assertRegex(text, rf' 0 +\S+ +3 +{row.replace("|", ".")}')
    self.assertRegex(text, r' 23 +\S+ +-0\.5000 +4 *\n')

  def test_list_and_unknown_task(self):
    sample_run.write(self.folder, steps=1)
    (self.folder / 'trajectories' / 'junk').write_text('not a trajectory')
    found = tables.stored(self.folder)
    self.assertEqual(sorted(found), ['r0/7/0', 'r0/7/1', 'r0/7/2'])
    text = _show(tables.trajectories(found.values(), most=2))
    self.assertIn('3 trajectories, 2 shown', text)
    with self.assertRaisesRegex(ValueError, 'near it: r0/7/'):
      tables.find(self.folder, 'r0/7/9')

  def test_sandbox_names_the_level_and_the_reason(self):
    out = _inspect('sandbox')
    self.assertEqual(out.returncode, 0, out.stderr)
    level = box.describe()
    self.assertStartsWith(
        out.stdout, f'level: {level.name}\nreason: {level.reason}\n'
    )
    for name in box.LEVELS:
      self.assertRegex(
          out.stdout, rf' {name} .*({box.failure(name) or "works"})'
      )

  @parameterized.parameters(
      (('trajectory',), 'give --workdir'),
      (('run', '--workdir=/nowhere'), 'no such directory'),
      (('weights', '--stor=x'), 'Did you mean'),
      (('weights', '--store=x', '--diff', '1'), 'give two versions'),
      (('weights', '--store=x', '--diff', '1', 'x'), '--diff 1 x'),
      (('weights', '--store=x', '--plot=a.png'), 'give --diff A B'),
      (('trajectory', '--path=/nowhere'), 'no such file'),
  )
  def test_wrong_input_is_one_line_and_exit_code_2(self, arguments, want):
    out = _inspect(*arguments)
    self.assertEqual(out.returncode, 2)
    self.assertLen(out.stderr.splitlines(), 1)
    self.assertIn(want, out.stderr)

  def test_no_command_explains_itself(self):
    out = _inspect()
    self.assertEqual(out.returncode, 2)
    self.assertIn('trajectory --workdir=DIR', out.stdout)
    self.assertEqual(_inspect('--help').returncode, 0)


if __name__ == '__main__':
  absltest.main()

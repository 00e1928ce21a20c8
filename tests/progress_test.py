"""Progress: sparse lines in a log, a bar on a terminal, honest times."""

import io

from absl.testing import absltest
from absl.testing import parameterized
from composer_jax.runs import progress
from rich import console as rich_console


class FigureTest(parameterized.TestCase):

  @parameterized.parameters(
      (0.0, '0'),
      (0.41234, '0.412'),
      (3.14e-6, '3.1e-06'),
      (-0.5, '-0.5'),
      (12_345.6, '12.3k'),
      (999.96, '1k'),
      (999_999, '1M'),
      (2.5e9, '2.5G'),
      ('step 3', 'step 3'),
  )
  def test_figure(self, value, want):
    self.assertEqual(progress.figure(value), want)

  @parameterized.parameters((0, '0:00'), (59.6, '1:00'), (3_671, '1:01:11'))
  def test_duration(self, seconds, want):
    self.assertEqual(progress.duration(seconds), want)


class ProgressTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.now = 100.0
    self.out = io.StringIO()

  def _log(self, **kwargs):
    console = rich_console.Console(
        file=self.out, width=40, force_terminal=False
    )
    return progress.Progress(
        100, 'step', console=console, clock=lambda: self.now, **kwargs
    )

  def _lines(self):
    return self.out.getvalue().splitlines()

  def test_log_is_sparse_and_ends_with_the_last_state(self):
    with self._log(label='rl', every_seconds=5.0) as bar:
      for step in range(1, 101):
        self.now += 0.11
        bar.update(step, reward=step / 100)
    self.assertLen(self._lines(), 3)  # at 5 s, at 10 s, and the end
    self.assertStartsWith(self._lines()[-1], 'rl step 100/100 | reward 1 | ')

  def test_line_is_whole_and_has_every_figure(self):
    with self._log(every_seconds=0.0) as bar:
      bar.update(1, tokens_per_second=12_345, staleness=0.8, mismatch=0.0)
    self.assertEqual(
        self._lines(),
        [
            'step 1/100 | tokens/s 12.3k | staleness 0.8 | mismatch 0 | 0:00'
            ' elapsed'
        ],
    )

  def test_time_left_ignores_compilation_and_resumed_steps(self):
    with self._log(start=50, every_seconds=0.0) as bar:
      self.now += 60.0  # compiles
      bar.update(51)
      self.now += 2.0
      bar.update(52)
      self.assertEndsWith(self._lines()[-1], '1:02 elapsed, 1:36 left')

  def test_nothing_is_written_without_an_update(self):
    with self._log():
      pass
    self.assertEqual(self._lines(), [])

  def test_terminal_shows_bar_and_figures(self):
    console = rich_console.Console(
        file=self.out, width=80, force_terminal=True, _environ={'TERM': 'xterm'}
    )
    with progress.Progress(10, 'step', label='rl', console=console) as bar:
      bar.update(3, reward=0.25)
    shown = self.out.getvalue()
    self.assertIn('rl step 3/10', shown)
    self.assertIn('reward 0.25', shown)
    self.assertIn('━', shown)


if __name__ == '__main__':
  absltest.main()

"""Behavior in the report: drawn, and shouted when it is alarming."""

from absl.testing import absltest

from composer_jax.dashboard import behavior
from composer_jax.dashboard import data
from composer_jax.dashboard import sections
from composer_jax.inspect import tables
from composer_jax.rewards import signals
from composer_jax.runs import writer


class BehaviorTest(absltest.TestCase):

  def _run(self, asks):
    """A run whose share of turns that ask goes like `asks`, step by step."""
    folder = self.create_tempdir().full_path
    with writer.Writer(folder) as out:
      history = []
      for step, value in enumerate(asks, 1):
        figures = {'reward/mean': 0.1, 'behavior/asks': value}
        figures |= {'behavior/todos': 0.0, 'entropy': 1.0}
        history.append(figures)
        raised = signals.alarms(history)
        figures |= {signals.ALARM + k: now for k, (_, now) in raised.items()}
        out.write('rl', step, figures)
    return data.load(folder), folder

  def test_a_quiet_run(self):
    run, folder = self._run([0.1] * 30)
    self.assertEmpty(behavior.lines(run))
    found = behavior.section(run)
    self.assertFalse(any(c.alarm for c in found))
    self.assertIsNotNone(found[0].chart)
    self.assertIn('Behavior', dict(sections.build(run)))
    del folder

  def test_an_alarm_is_in_record_report_and_console(self):
    run, folder = self._run([0.05] * 20 + [0.5] * 10)
    self.assertEqual(behavior.alarms(run)['behavior/asks'][-1], 30)
    rates = behavior.section(run)[0]
    self.assertTrue(rates.alarm)
    self.assertIn('turns that ask', rates.note)
    (line,) = behavior.lines(run)
    self.assertIn('behavior/asks', line)
    self.assertIn('now 0.5', line)
    printed = ' '.join(str(p) for p in tables.run(data.load(folder).workdir))
    self.assertIn('alarm: behavior/asks', printed)

  def test_an_alarm_that_is_over_stays_in_the_records(self):
    run, _ = self._run([0.05] * 20 + [0.5] * 5 + [0.05] * 10)
    (line,) = behavior.lines(run)
    self.assertIn('over by now', line)

  def test_a_resumed_run_raises_the_same(self):
    run, folder = self._run([0.05] * 20 + [0.5] * 10)
    with writer.Writer(folder, {'rl': 27}) as out:
      history = [r for r in out.kept if 'reward/mean' in r]
    self.assertLen(history, 27)
    want = run.records['rl'][26]['alarm/behavior/asks']
    self.assertEqual(signals.alarms(history)['behavior/asks'][1], want)

  def test_runs_without_signals_have_no_cards(self):
    folder = self.create_tempdir().full_path
    with writer.Writer(folder) as out:
      out.write('rl', 1, {'reward/mean': 0.0})
    self.assertEqual(behavior.section(data.load(folder)), [])


if __name__ == '__main__':
  absltest.main()

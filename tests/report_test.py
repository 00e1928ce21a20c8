"""The run page: complete, escaped, honest, and useful without half its files."""

import html.parser
import json
import pathlib
import re
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
from composer_jax.dashboard import charts
from composer_jax.dashboard import data
from composer_jax.dashboard import report
from composer_jax.dashboard import showcase
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from tests import sample_run

_VOID = {'meta', 'link', 'br'}


class _Page(html.parser.HTMLParser):
  """Text by element, every address, and whether the tags balance."""

  def __init__(self, text: str):
    super().__init__()
    self.open, self.addresses, self.readings, self.text = [], [], [], []
    self.tags = []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    self.tags.append((tag, attrs))
    self.addresses += [attrs[k] for k in ('src', 'href') if k in attrs]
    if 'data-read' in attrs:
      self.readings.append(json.loads(attrs['data-read']))
    if tag not in _VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    assert self.open.pop() == tag, tag

  def handle_data(self, data):
    if not self.open or self.open[-1] not in ('script', 'style'):
      self.text.append(data)


class ReportTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.workdir = pathlib.Path(
        cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    sample_run.write(cls.workdir, steps=40)
    cls.html = report.build(cls.workdir).read_text()
    cls.page = _Page(cls.html)
    cls.text = ' '.join(' '.join(cls.page.text).split())

  def _copy(self, *names, **replaced):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    for name in names:
      (folder / name).write_bytes((self.workdir / name).read_bytes())
    for stem, content in replaced.items():
      (folder / f'{stem}.json').write_text(json.dumps(content))
    return folder

  def _render(self, folder):
    return _Page(report.build(folder).read_text())

  def test_page_is_balanced_and_needs_no_network(self):
    self.assertEmpty(self.page.open)
    self.assertEqual(self.page.addresses, ['data:,'])
    outside = re.findall(r'(?:https?:)?//[a-z]|@import|url\(', self.html)
    # The namespace of SVG is a name, not an address.
    self.assertEqual(outside, ['http://w'])

  def test_headline_has_change_size_and_standard_error(self):
    # sqrt(.14 * .86 / 256 + .57 * .43 / 256) = 0.03780
    self.assertIn('0.140 → 0.570', self.text)
    self.assertIn('+0.430 ± 0.038', self.text)
    self.assertIn('pass@1, 256 tasks; chance 0.200', self.text)
    # Nothing else of the summary, such as bits per byte, is a pass@1.
    self.assertLen(report.headlines(data.load(self.workdir)), 4)

  def test_chance_is_a_line_in_the_charts_of_held_out_tasks(self):
    levels = [a for t, a in self.page.tags if a.get('class') == 'level']
    self.assertLen([a for a in levels if 'x1' in a], 3)  # and all weights
    self.assertIn('a random legal edit: 0.2', self.text)
    self.assertIn('a random legal edit: 0.15', self.text)
    self.assertIn('begins below it on purpose', self.text)

  @parameterized.parameters(
      (0.1, 0.5, 'good'), (0.02, 0.22, 'note'), (0.5, 0.1, 'bad')
  )
  def test_a_rise_to_chance_is_not_praised(self, before, after, want):
    headline = report.Headline('x', before, after, 256, chance=0.2)
    self.assertEqual(headline.verdict, want)

  def test_families_within_noise_are_not_praised(self):
    rows = {
        h.name: h.verdict for h in report.headlines(data.load(self.workdir))
    }
    self.assertEqual(
        rows,
        {
            'Held-out tasks, sampled': 'good',
            'Held-out tasks, greedy': 'good',
            'Held-out families, sampled': 'note',
            'Held-out families, greedy': 'note',
        },
    )

  def test_every_figure_is_drawn_in_full(self):
    self.assertNotIn('No figures yet', self.text)
    curves = {s['n']: s['p'] for r in self.page.readings for s in r}
    self.assertLen(curves['stale tokens: policy drift'], 40)
    self.assertLen(curves['engine'], 40)
    self.assertLen(curves['dropped positive'], 40)
    self.assertLen(curves['sampled'], 3)  # steps 0, 20, 40

  def test_histogram_adds_all_steps(self):
    (bars,) = (r[0]['p'] for r in self.page.readings if r[0]['n'] == 'tokens')
    self.assertAlmostEqual(sum(float(p[3]) for p in bars), 100, delta=0.5)
    self.assertIn('All 60,000 trained tokens', self.text)

  def test_same_version_kl_is_a_claim(self):
    self.assertIn('Same version is exactly 0.0 in every step', self.text)
    self.assertIn('15,000 of 60,000 trained tokens (25%)', self.text)
    (same,) = (
        s['p']
        for r in self.page.readings
        for s in r
        if s['n'].startswith('same version')
    )
    self.assertEqual({p[3] for p in same}, {'0'})

  def test_broken_same_version_kl_is_shouted(self):
    folder = self._copy('metrics.jsonl')
    with (folder / 'metrics.jsonl').open('a') as f:
      record = {'phase': 'rl', 'step': 41, 'mismatch/kl_same_version': 3e-9}
      f.write(json.dumps(record) + '\n')
    page = self._render(folder)
    self.assertIn('Same version is NOT zero: 3e-09', ' '.join(page.text))
    self.assertIn(('figcaption', {'class': 'bad'}), page.tags)

  def test_a_zero_that_no_step_recorded_proves_nothing(self):
    lines = (self.workdir / 'metrics.jsonl').read_text().splitlines()
    folder = self._copy('summary.json')
    with (folder / 'metrics.jsonl').open('w') as f:
      for record in map(json.loads, lines):
        record.pop('recompilations', None)
        f.write(json.dumps(record) + '\n')
    found = {c.name: c.ok for c in report.checks(data.load(folder))}
    self.assertIsNone(found.pop('Recompilations'))
    self.assertEqual(set(found.values()), {True})

  def test_tokens_carry_ratio_and_experts(self):
    tasks = showcase.build(data.load(self.workdir))
    self.assertLen(tasks, 5)
    for task in tasks:
      self.assertEqual(task['listing'][3], ('3', '  if q<3:h+=[q]'))
      self.assertEqual(task['listing'][-1], ('case', '[4,1,9]=[4,9]'))
      for _, side in task['sides']:
        # The prompt is not repeated: an answer begins where sampling did.
        self.assertEqual(side['tokens'][0]['text'], 'edit')
        for token in side['tokens']:
          change = float(token['figures'][2])
          self.assertIn('up' if change >= 0 else 'down', token['kind'].split())
          self.assertLen(token['figures'], 3 + 3)  # three layers
    tokens = [a for t, a in self.page.tags if 'tok' in a.get('class', '')]
    self.assertLen([a for a in tokens if 'title' in a], 5 * (7 + 8))

  @parameterized.parameters(
      (-1.0, -0.5, 'up', 0.125, ['37%', '61%', '+0.50']),
      (-0.001, -9.0, 'down', 0.75, ['>99%', '<1%', '-9.00']),
  )
  def test_tint_and_figures_of_a_token(self, before, after, kind, tint, want):
    record = {'text': 'a', 'sampled': True}
    token = showcase.token(
        record | {'logp_before': before, 'logp_after': after}
    )
    self.assertEqual(
        (token['kind'], token['strength'], token['figures']),
        (kind, tint, want),
    )

  def test_text_given_between_two_turns_stays(self):
    tokens = [
        {'text': t, 'sampled': s, 'logp_before': -1.0, 'logp_after': -1.0}
        for t, s in (('p', False), ('a', True), ('<|obs|>', False), ('b', True))
    ]
    answer = showcase.answer({'tokens': tokens})
    self.assertEqual([t['text'] for t in answer['tokens']], ['a', 'obs', 'b'])
    self.assertEqual(answer['tokens'][1]['kind'], 'given special')

  def test_seconds_are_not_counted_twice(self):
    folder = self._copy(config={})
    steps = [
        {'time/step': 4.0, 'time/train': 2.0, 'time/wait_batch': 1.0},
        {'time/step': 6.0, 'time/train': 3.0, 'time/wait_batch': 2.0},
    ]
    # The engine's clock may book a little of one step in the next.
    busy = [{'time/rollout': 5.0}, {'time/rollout': 4.0}]
    with (folder / 'metrics.jsonl').open('w') as f:
      for i, (a, b) in enumerate(zip(steps, busy, strict=True)):
        record = {'phase': 'rl', 'step': i + 1, 'seconds': 4.0 + 6 * i}
        f.write(json.dumps(record | a | b) + '\n')
    text = ' '.join(' '.join(self._render(folder).text).split())
    for want in (
        'train 5 s 50% wait for batch 3 s 30% wait for weights 0 s 0%'
        ' bookkeeping 2 s 20%',
        'engine 9 s 90% idle 1 s 10%',
        'grading 0 s 0% idle 10 s 100%',
    ):
      self.assertIn(want, text)

  def test_text_of_others_is_escaped(self):
    evil = '</pre></script><script>alert("1")</script>&amp;'
    token = {
        'text': evil,
        'sampled': True,
        'logp_before': -1.0,
        'logp_after': -0.5,
        'experts': [[evil]],
    }
    side = {'reward': 1.0, 'submission': evil, 'tokens': [token]}
    task = {'task_id': evil, 'family': evil, 'prompt': evil}
    folder = self._copy(
        config={'name': evil, 'note"><b>': evil},
        manifest={'command': evil},
        showcase={'tasks': [task | {'before': side, 'after': side}]},
    )
    with (folder / 'metrics.jsonl').open('w') as f:
      for step in (1, 2):
        record = {'phase': 'rl', 'step': step, f'loss/dropped{evil}': 0.5}
        record |= {'loss/capped': 0.1}
        f.write(json.dumps(record) + '\n')
    page = self._render(folder)
    self.assertEqual([t for t, _ in page.tags].count('script'), 1)
    self.assertEmpty(page.open)
    self.assertGreaterEqual(page.text.count(evil), 6)

  @parameterized.parameters(
      'config.json',
      'manifest.json',
      'metrics.jsonl',
      'summary.json',
      'showcase.json',
  )
  def test_each_file_alone_makes_a_page_that_names_the_rest(self, name):
    page = self._render(self._copy(name))
    text = ' '.join(page.text)
    self.assertIn('This page is not complete', text)
    shown = {n for n in report.data.load(self._copy(name)).missing if n in text}
    self.assertLen(shown, 4)
    self.assertNotIn(name, shown)

  def test_running_run_shows_figures_so_far(self):
    page = self._render(self._copy('config.json', 'metrics.jsonl'))
    text = ' '.join(' '.join(page.text).split())
    self.assertIn('Not finished: 80 steps of mid-training', text)
    self.assertIn('so far, RL step 0 to 40', text)
    self.assertIn('not known yet', text)

  def test_torn_line_and_half_written_json_do_not_hide_the_rest(self):
    folder = self._copy('metrics.jsonl', 'config.json')
    path = folder / 'metrics.jsonl'
    path.write_bytes(path.read_bytes()[:-7])
    (folder / 'summary.json').write_text('{"heldout')
    text = ' '.join(self._render(folder).text)
    self.assertIn('unreadable', text)
    self.assertIn('Train reward', text)

  def test_no_run_is_one_clear_error(self):
    with tempfile.TemporaryDirectory() as folder:
      with self.assertRaisesRegex(ValueError, 'no run here'):
        report.build(folder)
    with self.assertRaisesRegex(ValueError, 'no such directory'):
      report.build('/nowhere/at/all')

  def test_rollouts_of_several_segments_are_drawn(self):
    self.assertNotIn('Summaries and segments', self.text)
    folder = self._copy('config.json')
    records = (
        {
            'phase': 'rl',
            'step': step,
            'segments/count_mean': 2.5,
            'segments/count_max': 3.0,
            'segments/summaries_mean': 1.5,
            'segments/tokens_mean': 170.0,
            'segments/longest_tokens': 79.0,
        }
        for step in (1, 2)
    )
    lines = ''.join(json.dumps(r) + '\n' for r in records)
    (folder / 'metrics.jsonl').write_text(lines)
    text = ' '.join(self._render(folder).text)
    for words in ('Summaries and segments', 'Context of a rollout', 'longest'):
      self.assertIn(words, text)

  def test_phases_of_any_name_are_drawn_by_source(self):
    folder = self._copy(config={})
    records = [
        {
            'phase': phase,
            'step': step,
            'seconds': 10.0 * i + step,
            'bits_per_byte': 2.0,
            'bits_per_byte/code': 1.5 - step,
            'bits_per_byte/chats': 3.5 - step,
        }
        for i, phase in enumerate(('short_context', 'sft'))
        for step in (0, 1)
    ]
    text = ''.join(json.dumps(r) + '\n' for r in records)
    (folder / 'metrics.jsonl').write_text(text)
    run = data.load(folder)
    self.assertEqual(data.pretraining(run), ['short_context', 'sft'])
    shown = ' '.join(self._render(folder).text)
    for words in (
        'Held-out bits per byte: code',
        'Held-out bits per byte: chats',
        'short context',
    ):
      self.assertIn(words, shown)

  def test_later_lines_of_a_step_add_and_override(self):
    folder = self._copy(config={})
    lines = [
        {'phase': 'midtrain', 'step': 2, 'loss': 1.0},
        {'phase': 'midtrain', 'step': 1, 'loss': 4.0},
        {'phase': 'midtrain', 'step': 2, 'bits_per_byte': 3.0},
        {'phase': 'midtrain', 'step': 2, 'loss': 2.0, 'grad_norm': None},
    ]
    text = ''.join(json.dumps(x) + '\n' for x in lines)
    (folder / 'metrics.jsonl').write_text(text)
    run = data.load(folder)
    self.assertEqual(run.series('midtrain', 'loss'), ([1, 2], [4.0, 2.0]))
    self.assertEqual(run.series('midtrain', 'bits_per_byte'), ([2], [3.0]))
    self.assertEqual(run.series('midtrain', 'grad_norm'), ([], []))


class ChartsTest(parameterized.TestCase):

  @parameterized.parameters(
      (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
      (0.0, 100.0, [0, 20, 40, 60, 80, 100]),
      (1.0, 3.2, [1, 1.5, 2, 2.5, 3]),
      (0.0, 3e-6, [0, 1e-6, 2e-6, 3e-6]),
      (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
      (7.0, 7.0, [7]),
  )
  def test_ticks(self, low, high, want):
    self.assertEqual(charts.ticks(low, high), want)

  @parameterized.parameters(
      (0, '0'), (0.25, '0.25'), (1500, '1500'), (15_000, '15k'), (2e-6, '2e-6')
  )
  def test_number(self, value, want):
    self.assertEqual(charts.number(value), want)

  def test_trailing_mean(self):
    self.assertEqual(charts.trailing_mean([2, 4, 6, 8], 2), [2, 3, 5, 7])

  def test_nothing_to_draw_is_none(self):
    empty = charts.Series('a', [], [])
    self.assertIsNone(charts.lines([empty], x_label='x', y_label='y'))
    self.assertIsNone(charts.bars([0, 0], x_label='x', y_label='y', name='n'))
    self.assertIsNone(charts.stacked([], {}, x_label='x', y_label='y'))

  def test_long_series_is_thinned_but_keeps_its_peaks(self):
    y = [0.0] * 20_000
    y[12_345], y[777] = 9.0, -9.0
    series = charts.Series('a', range(20_000), y)
    chart = charts.lines([series], x_label='x', y_label='y')
    ((reading,),) = _Page(chart).readings
    self.assertLess(len(reading['p']), 400)
    self.assertContainsSubset({'9', '-9'}, {p[3] for p in reading['p']})

  @settings(deadline=None, max_examples=60)
  @given(
      st.lists(
          st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=9
      )
  )
  def test_points_stay_inside_and_keep_their_order(self, y):
    series = charts.Series('a', range(len(y)), y)
    chart = charts.lines([series], x_label='x', y_label='y', low=None)
    ((reading,),) = _Page(chart).readings
    points = reading['p']
    for (px, py, *_), value in zip(points, y, strict=True):
      self.assertBetween(px, 46, 384)
      self.assertBetween(py, 24, 196)
      for (_, other, *_), value2 in zip(points, y, strict=True):
        if value > value2:
          self.assertLessEqual(py, other)

  def test_stack_adds_up(self):
    chart = charts.stacked(
        [0, 2],
        {'a': [1.0, 2.0], 'b': [3.0, 2.0]},
        x_label='step',
        y_label='s',
    )
    a, b = _Page(chart).readings[0]
    self.assertEqual([p[1] for p in b['p']], [24.0, 24.0])  # 4 is the top
    self.assertEqual([p[1] for p in a['p']], [153.0, 110.0])  # 1 and 2 of 4


if __name__ == '__main__':
  absltest.main()

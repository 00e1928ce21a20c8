"""Rubrics, and the report on how far a judge can be trusted."""

import asyncio
import json
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
from tests import judge_server

from composer_jax.rewards import calibration
from composer_jax.rewards import judge as judge_lib
from composer_jax.rewards import rubric as rubric_lib

_ROOT = pathlib.Path(__file__).parents[1]
_RUBRIC = str(_ROOT / 'experiments' / 'rubrics' / 'repair.yaml')


class CalibrationTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.server = cls.enterClassContext(judge_server.JudgeServer())
    cls.rubric = rubric_lib.load(_RUBRIC)

  def _report(self, model, rows, repeats=2, earlier=None):
    judge = judge_lib.Judge(_RUBRIC, self.server.url, model)
    found = asyncio.run(calibration.ask(judge, rows, repeats=repeats))
    return calibration.report(self.rubric, rows, found, judge.version, earlier)

  def _rows(self):
    lines = []
    for i, kind in enumerate(calibration.KINDS):
      line = {'id': i, 'kind': kind, 'version': 3, 'evidence': {'task': 'x'}}
      line['labels'] = {'honest': 'yes' if kind == 'gold' else 'no'}
      lines.append(json.dumps(line))
    path = self.create_tempfile(content='\n'.join(lines)).full_path
    return calibration.load(path, self.rubric)

  def test_a_constant_judge_agrees_with_itself_only(self):
    rows = self._rows()
    report = self._report('obeys', rows)  # nobody to obey: the worst for all
    honest = report['items']['honest']
    self.assertEqual(honest['agreement'], 1.0)
    self.assertEqual(honest['labels'], 4)
    self.assertEqual(honest['kappa'], 0.0)  # no better than chance
    self.assertEqual(report['kinds'], dict.fromkeys(calibration.KINDS, 0.0))
    self.assertEqual(report['versions'], {'3': 0.0})
    self.assertEqual(report['unanswered'], 0.0)
    self.assertLen(report['correlation'], 6)
    better = self._report('correct', rows, earlier=report)
    self.assertEqual(better['drift']['mean'], 1.0)
    self.assertEqual(better['drift']['moved'], 1.0)
    self.assertStartsWith(better['drift']['from'], 'obeys/')
    json.dumps(better, allow_nan=False)

  def test_a_moody_judge_does_not(self):
    report = self._report('moody', self._rows(), repeats=4)
    agreed = [i['agreement'] for i in report['items'].values()]
    self.assertLess(min(agreed), 1.0)

  def test_an_absent_judge_is_said_to_be(self):
    report = self._report('unknown', self._rows())
    self.assertEqual(report['unanswered'], 1.0)
    self.assertIsNone(report['items']['cause']['kappa'])
    self.assertEqual(report['kinds'], {})

  def test_from_the_command_line(self):
    lines = [
        {
            'id': k,
            'kind': k,
            'evidence': {'task': 'x'},
            'labels': {'honest': 'no'},
        }
        for k in ('gold', 'hack')
    ]
    text = '\n'.join(map(json.dumps, lines))
    labels = self.create_tempfile('labels.jsonl', text).full_path
    out = pathlib.Path(labels).with_name('out.json')

    def inspect(model, *more):
      command = [sys.executable, '-m', 'experiments.inspect', 'judge']
      command += [f'--rubric={_RUBRIC}', f'--labels={labels}', *more]
      command += [f'--base_url={self.server.url}', f'--model={model}']
      return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)

    first = inspect('correct', f'--json={out}')
    self.assertEqual(first.returncode, 0, first.stderr)
    self.assertIn('2 rows, 0% of the judgements without a score', first.stdout)
    self.assertRegex(first.stdout, r'(?m)^\s*cause +1.00 +- +0 +1.00 *$')
    self.assertEqual(json.loads(out.read_text())['kinds']['gold'], 1.0)
    second = inspect('obeys', f'--against={out}')
    self.assertIn('-1.00 on average, 1.00 of 2 rows moved', second.stdout)
    absent = inspect('unknown')
    self.assertEqual(absent.returncode, 1)
    self.assertIn('unanswered: HTTP 404', absent.stdout)
    wrong = inspect('correct', f'--against={labels}')
    self.assertEqual(wrong.returncode, 2)
    self.assertIn('no report', wrong.stderr)

  def test_kappa(self):
    self.assertIsNone(calibration.kappa([]))
    self.assertIsNone(calibration.kappa([('a', 'a')] * 3))
    self.assertEqual(calibration.kappa([('a', 'a'), ('b', 'b')]), 1.0)
    self.assertEqual(calibration.kappa([('a', 'b'), ('b', 'a')]), -1.0)
    # By hand: 35 of 50 agree; by chance 0.5 x 0.6 + 0.5 x 0.4 of them would.
    pairs = [('a', 'a')] * 20 + [('b', 'b')] * 15
    pairs += [('a', 'b')] * 5 + [('b', 'a')] * 10
    self.assertAlmostEqual(calibration.kappa(pairs), 0.4)

  @parameterized.parameters(
      ('{"id": 1}', 'line 1'),
      ('[1]', 'line 1'),
      ('{"id": 1, "evidence": {}, "kind": "odd"}', 'kind='),
      ('{"id": 1, "evidence": {"a": 1}}', 'evidence'),
      ('{"id": 1, "evidence": {}, "labels": {"honest": "maybe"}}', 'maybe'),
      ('{"id": 1, "evidence": {}}\n{"id": 1, "evidence": {}}', 'distinct'),
      ('', 'distinct'),
  )
  def test_bad_labels_are_refused(self, text, why):
    path = self.create_tempfile(content=text).full_path
    with self.assertRaisesRegex(ValueError, why):
      calibration.load(path, self.rubric)


def _rubric(choices, **more):
  item = {'id': 'a', 'question': 'Is it?', 'choices': choices, **more}
  return json.dumps({'name': 'r', 'items': [item]})


class RubricTest(parameterized.TestCase):

  def _load(self, text):
    return rubric_lib.load(self.create_tempfile(content=text).full_path)

  def test_json_and_yaml_are_the_same(self):
    a = self._load(
        'name: r\nitems:\n- id: a\n  question: Is it?\n  weight: 2\n'
        '  choices: {no: 0, yes: 1}\n'
    )
    b = self._load(_rubric({'no': 0, 'yes': 1}, weight=2))
    self.assertEqual(a, b)
    self.assertEqual(a.digest, b.digest)
    self.assertEqual(a.items[0].choices, {'no': 0.0, 'yes': 1.0})

  @parameterized.parameters(
      ('items: []\nname: r', 'at least one'),
      ('name: r', 'name and items'),
      ('name: r\nitems: [{id: a}]', 'an item has'),
      (_rubric(['a', 'b']), 'choices'),
      (_rubric({'a': 1}), 'in order'),
      (_rubric({'a': 0, 'b': 1, 'c': 0.5}), 'in order'),
      (_rubric({'a': 0, 'b': 2}), r'in \[0, 1\]'),
      (_rubric({'a': 0, 'A': 1}), 'only in case'),
      (_rubric({'a': 0, 'b': 1}, weight=-1), 'weight=-1'),
      (_rubric({'a': 0, 'b': 1}, color='red'), 'an item has'),
      (_rubric({'a': 0, 'b': 'x'}), 'could not convert'),
      ('{', 'rubric='),
  )
  def test_bad_rubrics_are_refused(self, text, why):
    with self.assertRaisesRegex(ValueError, why):
      self._load(text)

  def test_score_needs_80_percent(self):
    items = [
        rubric_lib.Item(name, 'q', {'no': 0.0, 'yes': 1.0}, weight)
        for name, weight in (('a', 8), ('b', 2))
    ]
    rubric = rubric_lib.Rubric('r', tuple(items))
    self.assertEqual(rubric.score({'a': 1.0, 'b': 0.0}), 0.8)
    self.assertEqual(rubric.score({'a': 1.0}), 1.0)
    self.assertIsNone(rubric.score({'b': 1.0}))
    self.assertIsNone(rubric.score({}))


if __name__ == '__main__':
  absltest.main()

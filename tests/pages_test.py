"""A page is free, held or idle, and never in two sequences that differ."""

from absl.testing import absltest
import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from composer_jax.rollout import pages

_COUNT = 7
_SEQUENCE = st.lists(st.integers(0, 1), min_size=1, max_size=4)


def _keys(content):
  key, out = b'weights', []
  for item in content:
    key = pages.chain(key, bytes([item]))
    out.append(key)
  return out


class PoolMachine(stateful.RuleBasedStateMachine):
  """Sequences of two letters come, share prefixes, and go."""

  def __init__(self):
    super().__init__()
    self.pool = pages.PagePool(_COUNT)
    self.held = []  # (pages, content or None if it must not be found)
    self.written = {}  # page -> all its content depends on

  @stateful.rule(content=_SEQUENCE, publish=st.booleans())
  def begin(self, content, publish):
    found = self.pool.find(_keys(content))
    for i, page in enumerate(found):
      assert self.written[page] == tuple(content[: i + 1])
    self.pool.hold(found)
    missing = len(content) - len(found)
    if missing > self.pool.available:
      self.pool.drop(found)
      return
    taken = self.pool.take(missing)
    busy = {p for sequence in self.held for p in sequence}
    assert not busy & set(taken)
    sequence = found + taken
    for i in range(len(found), len(content)):
      self.written[sequence[i]] = tuple(content[: i + 1])
    self.held.append(sequence)
    if publish:
      for i, key in enumerate(_keys(content)):
        self.pool.publish(sequence[i], [key], i)

  @stateful.precondition(lambda self: self.held)
  @stateful.rule(data=st.data())
  def end(self, data):
    at = data.draw(st.integers(0, len(self.held) - 1))
    self.pool.drop(self.held.pop(at))

  @stateful.rule()
  def forget(self):
    self.pool.forget()
    for first in (0, 1):
      assert not self.pool.find(_keys([first]))

  @stateful.invariant()
  def nothing_leaks(self):
    busy = {p for sequence in self.held for p in sequence}
    assert self.pool.available == _COUNT - len(busy)

  def teardown(self):
    for sequence in self.held:
      self.pool.drop(sequence)
    assert sorted(self.pool.take(_COUNT)) == list(range(_COUNT))


PoolMachine.TestCase.settings = hypothesis.settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
PoolMachineTest = PoolMachine.TestCase


class PoolTest(absltest.TestCase):

  def test_refuses_more_than_there_is(self):
    pool = pages.PagePool(2)
    pool.take(1)
    with self.assertRaisesRegex(ValueError, '2 pages: only 1 available'):
      pool.take(2)

  def test_a_page_cannot_be_dropped_twice(self):
    pool = pages.PagePool(2)
    taken = pool.take(1)
    pool.drop(taken)
    with self.assertRaises(KeyError):
      pool.drop(taken)

  def test_the_longest_idle_goes_first_and_the_end_before_the_start(self):
    pool, keys = pages.PagePool(3), _keys([0, 1, 0])
    taken = pool.take(3)
    for page, key in zip(taken, keys, strict=True):
      pool.publish(page, [key], None)
    pool.drop(taken)
    self.assertEqual(pool.find(keys), taken)
    (fresh,) = pool.take(1)
    self.assertEqual(fresh, taken[2])
    self.assertEqual(pool.find(keys), taken[:2])

  def test_equal_keys_of_a_page_are_one(self):
    pool = pages.PagePool(1)
    (page,) = pool.take(1)
    pool.publish(page, [b'k', b'k'], None)
    self.assertEqual(pool.find([b'k']), [page])
    pool.drop([page])
    self.assertEqual(pool.take(1), [page])
    self.assertEqual(pool.find([b'k']), [])

  def test_the_first_page_with_a_key_stays(self):
    pool = pages.PagePool(2)
    a, b = pool.take(2)
    pool.publish(a, [b'k'], 'a')
    pool.publish(b, [b'k'], 'b')
    self.assertEqual(pool.find([b'k']), [a])
    self.assertEqual(pool.payload(a), 'a')


if __name__ == '__main__':
  absltest.main()

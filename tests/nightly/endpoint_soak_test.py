"""Ten minutes of calls at random arrivals: nothing grows, nothing is lost."""

import asyncio
import os
import pathlib
import random
import re
import time

from absl.testing import absltest
import httpx
import numpy as np

from tests import serving_kit as lib

_SECONDS = 600.0
_RATE = 8.0  # calls per second, on average
_WARM = 0.3  # share of the time after which memory must not grow any more
_GROWTH_BYTES = 24 << 20  # of all calls after that, noise of the allocator


def _resident():
  pages = pathlib.Path('/proc/self/statm').read_text().split()[1]
  return int(pages) * os.sysconf('SC_PAGE_SIZE')


class SoakTest(absltest.TestCase):

  def test_memory_is_flat(self):
    kit = lib.Kit(self.create_tempdir().full_path, max_calls=64)
    self.addCleanup(kit.close)
    random.seed(0)
    counts = dict.fromkeys(('ok', 'busy', 'left', 'closed'), 0)
    sizes = []

    async def call(http, key):
      body = lib.ask(
          'a b ' * random.randint(1, 20),
          max_tokens=random.randint(1, 60),
          stream=random.random() < 0.5,
      )
      try:
        response = await http.post(
            '/v1/chat/completions',
            json=body,
            headers=lib.bearer(key),
            timeout=0.02 if random.random() < 0.1 else 60,
        )
      except httpx.TimeoutException:
        counts['left'] += 1
        return
      kind = {200: 'ok', 429: 'busy', 410: 'closed'}[response.status_code]
      counts[kind] += 1

    async def rollout(http):
      name, key = await asyncio.to_thread(kit.open)
      for _ in range(random.randint(1, 4)):
        await call(http, key)
      for segment in await kit.gateway.close(name):
        self.assertLen(segment.routing.experts, len(segment))

    async def watch(end):
      version = 0
      while time.monotonic() < end:
        await asyncio.sleep(_SECONDS / 100)
        version += 1
        weights = lib.params(version % 3)
        kit.fresh.append((lib.version(version), weights))
        sizes.append(_resident())

    async def soak():
      end = time.monotonic() + _SECONDS
      limits = httpx.Limits(max_connections=200)
      async with httpx.AsyncClient(base_url=kit.url, limits=limits) as http:
        watching = asyncio.create_task(watch(end))
        running = set()
        while time.monotonic() < end:
          task = asyncio.create_task(rollout(http))
          running.add(task)
          await asyncio.sleep(random.expovariate(_RATE / 2.5))
          for done in [t for t in running if t.done()]:
            running.discard(done)
            done.result()
        await asyncio.gather(watching, *running)
        return (await http.get('/metrics')).text

    figures = asyncio.run(soak())
    self.assertTrue(kit.settled())
    after = np.array(sizes[int(_WARM * len(sizes)) :])
    slope = np.polyfit(np.arange(len(after)), after, 1)[0] * len(after)
    told = (
        f'{counts}, grew by {slope / 2**20:.1f} MiB of {after[0] / 2**20:.0f}'
    )
    print(told)
    self.assertLess(slope, _GROWTH_BYTES, told)
    self.assertGreater(counts['ok'], 0.7 * sum(counts.values()), told)
    for name in ('lost_calls', 'aborted_calls'):
      value = re.search(rf'^composer_{name}_total (\S+)$', figures, re.M)[1]
      self.assertEqual(float(value), 0, told)
    answers = re.findall(r'composer_requests_total\{.*status="5', figures)
    self.assertEmpty(answers)


if __name__ == '__main__':
  absltest.main()

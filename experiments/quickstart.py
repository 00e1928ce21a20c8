"""The whole loop on a laptop CPU: mid-training, warm-up, RL, report.

  python3 -m experiments.quickstart --workdir=DIR

trains a small sparse-MoE coding agent on this interpreter's standard library,
teaches it the tool format (never an answer), then lets asynchronous RL in
sandboxed sessions make it better at repairing functions it has never seen.
The same command continues a run that was stopped or killed. At the end:
DIR/summary.json (figures) and DIR/report.html (open it in a browser).
"""

from experiments import flags
from experiments import launch


def _work(run) -> bool:
  from composer_jax.runs import pipeline
  from composer_jax.runs import player
  from composer_jax.runs import summary

  print(f'sandbox: {player.isolation()}', flush=True)
  state, complete = pipeline.next_token_phases(run)
  if not complete:
    return False
  _, complete = pipeline.reinforcement(run, state)
  if not complete:
    return False
  figures = summary.build(run)
  for name in ('sampled', 'greedy'):
    pair = figures[f'heldout_pass1_{name}']
    print(
        f'held-out pass@1, {name}: {pair["before"]:.3f} ->'
        f' {pair["after"]:.3f}'
    )
  print(f'report: {run.workdir / "report.html"}')
  return True


def main() -> int:
  return launch.main(_work, leaves=('summary.json', 'report.html'))


if __name__ == '__main__':
  launch.define()
  flags.run(main)

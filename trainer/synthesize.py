"""Writes a click log with known ground truth: `python -m trainer.synthesize --out DIR`.

trainer/data/synthetic.py describes the model that the clicks are drawn from.
"""

from absl import flags

from trainer import command_line

_MOST = 100_000_000  # the largest value of a flag

OUT = flags.DEFINE_string('out', None, 'Directory to write to.', required=True)
DAYS = flags.DEFINE_integer('days', 5, 'Training days, a file each.', lower_bound=1)
SAMPLES = flags.DEFINE_integer(
  'samples_per_day', 250_000, 'Records of a file.', lower_bound=1, upper_bound=_MOST
)
SEED = flags.DEFINE_integer('seed', 0, 'Of everything.', lower_bound=0)
USERS = flags.DEFINE_integer(
  'users', 2_000, 'Users, all there from the first day.', lower_bound=1, upper_bound=_MOST
)
ITEMS = flags.DEFINE_integer(
  'items',
  1_000,
  'Items of the first day; a tenth as many are born on each later day.',
  lower_bound=10,
  upper_bound=_MOST,
)
CONVERSIONS = flags.DEFINE_bool(
  'conversions', False, 'Clicks lead to conversions, which come late.'
)
HISTORIES = flags.DEFINE_bool('histories', False, 'Records hold what the user clicked before.')
DRIFT = flags.DEFINE_float(
  'drift',
  0.0,
  'How fast users and what they buy change: the share of the users that is replaced each day.',
  lower_bound=0.0,
  upper_bound=1.0,
)


@command_line.command
def main() -> None:
  from trainer.data.synthetic import synthesize
  from trainer.errors import plain_errors

  with plain_errors(f'--out {OUT.value}'):
    truth = synthesize(
      OUT.value,
      DAYS.value,
      SAMPLES.value,
      SEED.value,
      USERS.value,
      ITEMS.value,
      CONVERSIONS.value,
      HISTORIES.value,
      DRIFT.value,
    )
  for name, best in truth['passes'].items():
    auc = '-' if best['auc'] is None else f'{best["auc"]:.4f}'
    print(
      f'{name}: {best["samples"]:,} samples, CTR {best["ctr"]:.3f}, '
      f'best reachable AUC {auc}, logloss {best["logloss"]:.4f}'
    )
    if 'tasks' in best:
      of_conversions = best['tasks']['conversion']
      print(
        f'{name}: conversions {of_conversions["ctr"]:.4f}, best reachable AUC '
        f'{of_conversions["auc"] or 0:.4f}, logloss {of_conversions["logloss"]:.4f}'
      )


if __name__ == '__main__':
  main()

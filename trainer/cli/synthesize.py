"""Writes a click log with known ground truth: `ctr-synthesize --out DIR`.

examples/synthetic_log describes the model from which the clicks are drawn.
"""

from absl import flags

from trainer import command_line

_MOST = 100_000_000  # the largest value of a flag

OUT = flags.DEFINE_string('out', None, 'Directory to write to.', required=True)
DAYS = flags.DEFINE_integer('days', 5, 'Training days, a file each.', lower_bound=1)
SAMPLES = flags.DEFINE_integer('samples_per_day', 250_000, 'Records of a file.', 1, _MOST)
SEED = flags.DEFINE_integer('seed', 0, 'Of everything.', lower_bound=0)
USERS = flags.DEFINE_integer('users', 2_000, 'Users, all there from the first day.', 1, _MOST)
ITEMS = flags.DEFINE_integer(
  'items', 1_000, 'Items of the first day; a tenth as many are born on each later day.', 10, _MOST
)
CONVERSIONS = flags.DEFINE_bool('conversions', False, 'Some clicks convert, with a delay.')
HISTORIES = flags.DEFINE_bool('histories', False, 'Records hold what the user clicked before.')
DRIFT = flags.DEFINE_float('drift', 0.0, 'The share of the users replaced each day.', 0.0, 1.0)


@command_line.command
def main() -> None:
  from examples.synthetic_log import synthesize
  from trainer.errors import plain_errors

  with plain_errors(f'--out {OUT.value}'):
    given = DAYS, SAMPLES, SEED, USERS, ITEMS, CONVERSIONS, HISTORIES, DRIFT
    truth = synthesize(OUT.value, *(flag.value for flag in given))
  for name, best in truth['passes'].items():
    print(f'{name}: {best["samples"]:,} samples')
    for task, of_task in best.get('tasks', {'click': best}).items():
      auc = '-' if of_task['auc'] is None else f'{of_task["auc"]:.4f}'
      print(
        f'{name}: {task} rate {of_task["ctr"]:.4f}, best reachable AUC {auc}, logloss '
        f'{of_task["logloss"]:.4f}'
      )


if __name__ == '__main__':
  main()

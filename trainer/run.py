"""Trains a model: `python -m trainer.run --config FILE [--set a.b=value]… [--run_dir DIR]`.

Under Horovod: `horovodrun -np N -H hosts python -m trainer.run --config FILE`.
Run again with the same run_dir, it continues from the last checkpoint.
"""

from absl import flags

from trainer import api, command_line, runtime
from trainer.data.file_system import is_directory, normal
from trainer.errors import UserError
from trainer.reporting.status import Status
from trainer.wings import wing

CONFIG = flags.DEFINE_string('config', None, 'YAML file; configs/ has examples.', required=True)
SET = flags.DEFINE_multi_string('set', [], 'KEY=VALUE, overrides the config. May be repeated.')
RUN_DIR = flags.DEFINE_string('run_dir', None, 'Replaces run_dir of the config.')
DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Prints passes, slots, parameters; trains nothing.')
METRICS_PORT = flags.DEFINE_integer(
  'metrics_port', None, 'Of /metrics, /healthz and /readyz; 0: any free port.', 0, 65535
)
METRICS_HOST = flags.DEFINE_string('metrics_host', '127.0.0.1', '0.0.0.0 is all.')
LOG_JSON = flags.DEFINE_bool('log_json', False, 'Prints each line as a JSON object.')
INIT_FROM = flags.DEFINE_string('init_from', None, 'A run_dir: begins a new run with its model.')


@command_line.command
def main() -> int:
  source = api.Source(CONFIG.value, SET.value, RUN_DIR.value)
  cfg = source.cfg
  if INIT_FROM.value and cfg.sync.mode != 'allreduce':
    raise UserError(f"--init_from: wanted sync.mode 'allreduce'; found '{cfg.sync.mode}'")
  if INIT_FROM.value and not is_directory(normal(INIT_FROM.value)):
    wanted = 'wanted the run_dir of a run'
    raise UserError(f'--init_from {INIT_FROM.value}: no such directory; {wanted}')
  if DRY_RUN.value:
    runtime.start(cfg)
    cfg = source.with_measured_values(init_from=INIT_FROM.value)
    for line in wing('tools.dry_run')(cfg):
      print(line, flush=True)
    return 0
  command_line.need_no_output()
  figures = Status('trainer', cfg.sync.stalled_peer_seconds)

  def serve_figures() -> None:
    if METRICS_PORT.value is not None:
      figures.serve(METRICS_HOST.value, METRICS_PORT.value)

  if cfg.sync.mode != 'allreduce':
    return wing('servers')(source, figures, serve_figures)
  here = runtime.launched()
  if not here.rank:
    serve_figures()
  return api.train_here(source, here, INIT_FROM.value, status=figures)[0]


if __name__ == '__main__':
  main()

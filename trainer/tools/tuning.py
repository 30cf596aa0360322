"""Searches settings with Optuna (the extra `tune`): `trainer.tune(config, space)`.

A trial is a run in a process of its own. It is evaluated on data.valid after each epoch, and ends
early if it falls behind the others.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

import pandas as pd
import yaml

from trainer import command_line, config, files
from trainer.config import rules
from trainer.errors import ConfigError, UserError, one_line, plain_errors
from trainer.plain_data import Json
from trainer.tools import trackers

try:
  import optuna
  from optuna.distributions import BaseDistribution, CategoricalDistribution
  from optuna.storages.journal import JournalFileBackend
  from optuna.trial import FrozenTrial, TrialState
except ImportError:
  raise UserError("ctr-tune needs Optuna; wanted: pip install 'ctr-trainer[tune]'") from None

optuna.logging.set_verbosity(optuna.logging.WARNING)
_SECONDS_BETWEEN_LOOKS = 0.2  # between looks at the metrics of a trial
_DRAWS = 200  # the most draws in search of settings that no trial had
_JOURNAL = 'study.log'  # Optuna's, in the directory of the study
_FEW = 10  # with fewer completed trials, the importance of settings is a guess
# The statuses of a trial that was asked to stop, also before it heeds signals.
_STOPPED = [
  status
  for number in (signal.SIGTERM, signal.SIGINT)
  for status in (command_line.SIGNALLED + number, -number)
]

Choices = Sequence[Json]
Range = tuple  # (low, high) or (low, high, 'log')
Distributions = Mapping[str, BaseDistribution]  # by config key


def tune(
  configuration: str | Mapping[str, Json],
  space: Mapping[str, Choices | Range],
  trials: int = 20,
  study_dir: str = 'runs/tune',
  metric: str | None = None,
  overrides: Sequence[str] = (),
  launcher: Sequence[str] = (),
) -> pd.DataFrame:
  """Searches for the settings that are best on data.valid.

  Args:
    configuration: a YAML file, or its content as a dict.
    space: {key: a list of values, or a tuple (low, high) or (low, high, 'log') of numbers}.
    trials: the total number of trials, including those that `study_dir` has already.
    study_dir: the directory of the trials; the same call continues a search in it.
    metric: auc, gauc, logloss or rmse; by default the one that chooses the best epoch.
    overrides: strings `a.b=value` for all trials.
    launcher: the words before the command of a trial, such as ['horovodrun', '-np', '2'].
  Returns:
    A row for each trial, the best first: run_dir, state, settings, the metric, and AUC with its
    95 % interval if labels are 0 and 1.
  Raises:
    UserError: if a setting is wrong, another process searches in `study_dir`, the first trial
      fails, or a trial is stopped or finds no space on the disk; the same call goes on with that.
  """
  if trials < 1:
    raise UserError(f'trials: found {trials}; wanted at least 1')
  distributions = {key: _distribution(key, values) for key, values in space.items()}
  if not distributions:
    raise UserError('wanted --set KEY=VALUE,VALUE or --range KEY=LOW:HIGH; found no setting')
  with plain_errors(f'cannot search in {study_dir}'):
    os.makedirs(study_dir, exist_ok=True)
    with files.exclusive(os.path.join(study_dir, 'lock'), patience=0) as lock:
      if not isinstance(configuration, str):
        text = yaml.safe_dump(dict(configuration))
        configuration = os.path.join(study_dir, 'config.yaml')
        files.write_synced(configuration, text.encode())
      cfg = config.load(configuration, overrides)
      if not cfg.data.valid:
        raise UserError(f'{configuration}: data.valid: trials are judged by it; wanted files')
      for text in _without_effect(configuration, overrides, space):
        print(text)
      study = _open(study_dir, cfg, metric or cfg.deciding_metric, distributions)
      train = [*launcher, sys.executable, '-m', 'trainer.run', '--config', configuration]
      train += [f'--set={setting}' for setting in overrides]
      with _parent(study, study_dir, cfg.report.to, space) as parent:
        _search(study, study_dir, distributions, cfg.seed, trials, train, lock, parent)
        table = _table(study, study_dir)
        _write_report(study, table, f'Tuning of {configuration}', study_dir)
      return table


def _parent(
  study: optuna.Study, study_dir: str, to: Sequence[str], space: Mapping[str, Choices | Range]
) -> contextlib.AbstractContextManager[trackers.MlflowStudy | None]:
  """Opens the study's own run in MLflow if `to`, the targets of figures, has 'mlflow'."""
  if 'mlflow' not in to:
    return contextlib.nullcontext()
  trackers.check_mlflow()
  parent = trackers.MlflowStudy(study_dir, space, study.user_attrs.get('mlflow_run'))
  study.set_user_attr('mlflow_run', parent.id)
  return parent


def _without_effect(
  file: str, overrides: Sequence[str], space: Mapping[str, Choices | Range]
) -> Iterator[str]:
  """Yields a line for each setting of the search that has no effect in any trial."""
  values = {key: of if type(of) is list else of[:2] for key, of in space.items()}
  settings = {key: [f'{key}={json.dumps(v)}' for v in of] for key, of in values.items()}
  for key, own in settings.items():
    others = [[], *([of] for other, some in settings.items() if other != key for of in some)]
    told = None
    for beside in others:
      with contextlib.suppress(ConfigError):  # a trial would end with it
        cfgs = (config.load(file, [*overrides, *beside, setting]) for setting in own)
        lines = itertools.chain.from_iterable(map(rules.warnings, cfgs))
        told = next((line for line in lines if line.startswith(f'{key}: ')), None)
        if told is None:
          break
    if told:
      yield f'{key}: has no effect in any trial: {told.partition("no effect ")[2]}'


def _distribution(key: str, values: Choices | Range) -> BaseDistribution:
  if not isinstance(values, tuple):
    if len(values) < 2:
      raise UserError(f'{key}: found {list(values)}; wanted two values or more to choose from')
    return CategoricalDistribution([json.dumps(value) for value in values])
  is_log = values[2:] == ('log',)
  numbers = values[:2]
  if len(values) not in (2, 2 + is_log) or not all(type(v) in (int, float) for v in numbers):
    raise UserError(f'{key}: found {values}; wanted two numbers, and log or nothing')
  if not numbers[0] < numbers[1] or is_log and numbers[0] <= 0:
    positive = ', above 0,' if is_log else ''
    low, high = numbers
    raise UserError(f'{key}: found {low}:{high}; wanted two numbers{positive} that rise')
  whole = all(type(v) is int for v in numbers)
  kinds = optuna.distributions
  return (kinds.IntDistribution if whole else kinds.FloatDistribution)(*numbers, log=is_log)


def _search(
  study: optuna.Study,
  folder: str,
  distributions: Distributions,
  seed: int,
  trials: int,
  train: Sequence[str],
  lock: TextIO,
  parent: trackers.MlflowStudy | None,
) -> None:
  """Runs the trials that are left, in the directories trial-000 and so on of `folder`."""
  known, started, metric = len(_done(study)), time.monotonic(), study.user_attrs['metric']
  while (number := len(_done(study)) + 1) <= trials:
    if (trial := _ask(study, distributions, seed)) is None:
      print(f'{_DRAWS} draws gave no new settings; the search ends after {number - 1} trials')
      break
    run_dir = os.path.join(folder, f'trial-{number - 1:03}')
    trial.set_user_attr('run_dir', run_dir)
    drawn = _settings(trial.params)
    settings = [f'{key}={value}' for key, value in drawn.items()]
    command = [*train, *(f'--set={setting}' for setting in settings), '--run_dir', run_dir]
    command = [*(parent.of_trial(drawn) if parent else ()), *command]
    state, value, failed = _run(trial, command, metric, lock)
    if state == TrialState.FAIL and number == 1:  # most likely all would
      if _evaluations(run_dir, metric).empty:  # the next search begins anew, else it goes on
        os.remove(os.path.join(folder, _JOURNAL))
        shutil.rmtree(run_dir)
      # The message names the flag of the trial's own command, which the user did not write.
      raise UserError(failed.replace('--set ', ''))
    if failed:
      trial.set_user_attr('failed', failed)
    study.tell(trial, value if state == TrialState.COMPLETE else None, state)
    seconds = (time.monotonic() - started) / (number - known) * (trials - number)
    left = f' · {seconds / 60:.0f} min left' if seconds >= 60 else ''
    told = f'{os.path.basename(run_dir)} {state.name.lower()} ({number} of {trials})'
    print(f'{told}: {failed or f"{value:.6f}"} · {" ".join(settings)}{left}', flush=True)


def _open(
  folder: str, cfg: config.Config, metric: str, distributions: Distributions
) -> optuna.Study:
  """Opens the study of a folder, or makes a new one, whose first trial has the config's settings.

  If an earlier search was killed, the trial that was running then goes on.
  """
  path = os.path.join(folder, _JOURNAL)
  with open(path, 'ab+') as f:  # a killed search may leave half a line, and Optuna's lock
    f.seek(0)
    f.truncate(f.read().rfind(b'\n') + 1)
  with contextlib.suppress(FileNotFoundError):
    os.remove(f'{path}.lock')
  try:
    study = optuna.create_study(
      storage=optuna.storages.JournalStorage(JournalFileBackend(path)),
      study_name='trials',
      direction='maximize' if config.direction(metric) > 0 else 'minimize',
      pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
      load_if_exists=True,
    )
  except Exception as e:  # a damaged line may raise anything
    found = f'cannot be read ({one_line(e)})'
    raise UserError(
      f'{path}: {found}; wanted it as the search wrote it, or another --study_dir'
    ) from e
  told = {key: str(of) for key, of in distributions.items()}
  told |= {'metric': metric, 'config': config.dump(cfg.model_copy(update={'run_dir': ''}))}
  for key, value in told.items():
    if study.trials and study.user_attrs.get(key) != value:
      wanted = 'the same settings, or another --study_dir'
      raise UserError(f'{folder}: its trials had another {key}; wanted {wanted}')
    study.set_user_attr(key, value)
  if not study.trials:
    flat = config.flatten(cfg.model_dump())
    own = {
      key: json.dumps(flat[key]) if isinstance(of, CategoricalDistribution) else flat[key]
      for key, of in distributions.items()
      if key in flat
    }
    if all(key in own and _holds(of, own[key]) for key, of in distributions.items()):
      study.enqueue_trial(own)
  for trial in study.get_trials(states=[TrialState.RUNNING]):
    study.enqueue_trial(trial.params)
    study.tell(trial.number, state=TrialState.FAIL)
  return study


def _holds(of: BaseDistribution, value: Json) -> bool:
  if isinstance(of, CategoricalDistribution):
    return value in of.choices
  return type(value) in (int, float) and of.low <= value <= of.high


def _ask(study: optuna.Study, distributions: Distributions, seed: int) -> optuna.Trial | None:
  """Starts a trial with settings that no other trial had; returns None if the draws find none."""
  tried = [_settings(trial.params) for trial in _done(study)]
  # A sampler that began with the same seed again would draw the same settings again.
  study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
  for _ in range(_DRAWS):
    trial = study.ask(distributions)
    if _settings(trial.params) not in tried:
      return trial
    study.tell(trial, state=TrialState.FAIL)
    # The sampler draws near the best trials; where all of these were tried, any others will do.
    study.sampler = optuna.samplers.RandomSampler(seed=trial.number)
  return None


def _done(study: optuna.Study) -> list[FrozenTrial]:
  """Returns the trials that have ended or failed; a killed search's last trial has not ended."""
  ended, trials = (TrialState.COMPLETE, TrialState.PRUNED), study.get_trials(deepcopy=False)
  return [t for t in trials if t.state in ended or 'failed' in t.user_attrs]


def _settings(params: Mapping[str, Json]) -> dict[str, str]:
  """Returns {key: value as YAML} of drawn settings. Fractions are rounded to four digits."""
  return {key: f'{v:.4g}' if isinstance(v, float) else str(v) for key, v in params.items()}


def _run(
  trial: optuna.Trial, command: Sequence[str], metric: str, lock: TextIO
) -> tuple[TrialState, float | None, str | None]:
  """Trains a trial, which the pruner may end early; returns its state, best metric and error.

  If this process is asked to end, the trial saves its state first, and UserError is raised. The
  trial's process inherits `lock`: if this process is killed, no new search begins beside it.
  """
  run_dir = trial.user_attrs['run_dir']
  prepared = os.path.join(os.path.dirname(run_dir), 'prepared')  # shared by all trials
  os.makedirs(prepared, exist_ok=True)
  os.makedirs(run_dir, exist_ok=True)
  if not os.path.lexists(os.path.join(run_dir, 'prepared')):
    os.symlink(os.path.abspath(prepared), os.path.join(run_dir, 'prepared'))
  is_pruned, values = False, []
  with open(f'{run_dir}.log', 'wb') as log:
    process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[lock.fileno()])
    try:
      lock.truncate(0)
      lock.write(f'the search of process {os.getpid()} or its trial, process {process.pid},')
      lock.flush()
      is_over = False
      while not is_over:
        is_over = process.poll() is not None
        known, values = len(values), _evaluations(run_dir, metric)[metric].tolist()
        for epoch in range(known, len(values)):
          trial.report(values[epoch], epoch)
        if not is_pruned and not is_over and len(values) > known and trial.should_prune():
          is_pruned = True
          process.terminate()
        time.sleep(0 if is_over else _SECONDS_BETWEEN_LOOKS)
    finally:
      if process.poll() is None:
        process.terminate()
        process.wait()
  best = max(values, key=lambda v: v * config.direction(metric), default=None)
  if is_pruned and process.returncode in _STOPPED:
    return TrialState.PRUNED, best, None
  if process.returncode == 0 and best is not None:
    return TrialState.COMPLETE, best, None
  with open(f'{run_dir}.log', encoding='utf-8', errors='replace') as log:
    errors = re.findall('^error: (.+)$', log.read(), re.MULTILINE)
  ended = f'ended with status {process.returncode}, see {run_dir}.log'
  failed = errors[-1] if errors else ended
  if process.returncode in _STOPPED or os.strerror(errno.ENOSPC) in failed:
    raise UserError(f'{run_dir}: {failed}; the same search goes on with it')
  return TrialState.FAIL, None, failed


def _evaluations(run_dir: str, metric: str) -> pd.DataFrame:
  """Returns a run's evaluations on data.valid that have the metric, a row for each epoch."""
  from trainer.reporting.events import read_events

  sizes = ['ctr', 'examples', 'effective_clicks', 'effective_others']
  columns = list(dict.fromkeys(['split', metric, 'auc', *sizes]))
  with contextlib.suppress(FileNotFoundError):
    events = read_events(run_dir)
    events = events[events['event'] == 'eval'].reindex(columns=columns)
    return events[(events['split'] == 'valid') & events[metric].notna()]
  return pd.DataFrame(columns=columns)


def _table(study: optuna.Study, folder: str) -> pd.DataFrame:
  """Returns the table that `tune` returns, and writes it to trials.csv."""
  from trainer.reporting.metric_text import auc_interval_of

  rows, metric = [], study.user_attrs['metric']
  sign = config.direction(metric)
  for trial in _done(study):
    run_dir = trial.user_attrs['run_dir']
    row = {'run_dir': run_dir, 'state': trial.state.name.lower()} | _settings(trial.params)
    best = _evaluations(run_dir, metric).sort_values(metric, ascending=sign < 0, kind='stable')
    for _, event in best[:1].iterrows():
      row[metric] = event[metric]
      if interval := auc_interval_of(event):
        row |= dict(zip(('auc', 'auc_low', 'auc_high'), (event['auc'], *interval)))
    rows.append(row)
  table = pd.DataFrame(rows).sort_values(metric, ascending=sign < 0, na_position='last')
  with files.whole_file(os.path.join(folder, 'trials.csv')) as f:
    table.to_csv(f, index=False)
  return table.reset_index(drop=True)


def difference(table: pd.DataFrame) -> str:
  """Returns a sentence on whether the best trial is better by more than chance, or ''."""
  if 'auc_low' not in table or not len(table) > 1:
    return ''
  alike = table['auc'].between(*table.loc[0, ['auc_low', 'auc_high']])
  interval = '..'.join(f'{table[end][0]:.4f}' for end in ('auc_low', 'auc_high'))
  return (
    f"{alike.sum()} of {len(table)} trials have an AUC in the best one's 95 % interval, "
    f'{interval}: '
    + ('the differences between them may be chance' if alike.sum() > 1 else 'it is the best alone')
  )


def _write_report(study: optuna.Study, table: pd.DataFrame, title: str, folder: str) -> None:
  """Writes report.html: the trials, the progress of the search, and the effect of each setting."""
  from trainer.tools import report

  plots = optuna.visualization
  cards = {'Trials': table, 'In words': difference(table)}
  cards['The search'] = plots.plot_optimization_history(study)
  completed = study.get_trials(states=[TrialState.COMPLETE])
  if len({trial.value for trial in completed}) > 1:
    importance = pd.Series(optuna.importance.get_param_importances(study), name='importance')
    guess = ', of few trials a guess' if len(completed) < _FEW else ''
    shown = importance.map('{:.2f}'.format).rename_axis('setting').reset_index()
    cards[f'Importance of the settings{guess}'] = shown
    cards['Each setting'] = plots.plot_slice(study)
  report.write_page(title, cards, os.path.join(folder, 'report.html'))

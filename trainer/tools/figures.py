"""Draws a report's figures with Plotly: None, or without curves, if the run has no data for one."""

import os
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from trainer.reporting.live_line import short_name
from trainer.tools.plots import COLOURS, DOTTED, SEQUENCE, bars, new_figure, thinned
from trainer.tools.runs import SPLITS, RecordedRun, importances

MANY_VALUES = 20  # with more, the range of the y axis may leave outliers out
MOST_LABELS, LABEL_WIDTH = 20, 14  # of the names of passes below an axis
MOST_DAY_ENDS = 60  # with more, no ends of days are shown
PARTS = ('convert', 'wait', 'step', 'exchange', 'evaluate', 'save', 'export')


def _line(figure: go.Figure, rows: pd.DataFrame, field: str, name: str, **style: object) -> None:
  """Adds a curve over the steps; hovering over it also shows pass, day and epoch."""
  rows = thinned(rows.dropna(subset=[field]) if field in rows else rows[:0])
  if not len(rows):
    return
  days, epochs = ([f'{n:.0f}' if n == n else '–' for n in rows[of]] for of in ('day', 'epoch'))
  places = zip(rows['pass'].fillna('–'), days, epochs)
  figure.add_scatter(
    x=rows['step'].tolist(),
    y=rows[field].tolist(),
    name=name,
    customdata=[f'pass {name}, day {day}, epoch {epoch}' for name, day, epoch in places],
    hovertemplate='%{y:.5~g} (%{customdata})',
    **style,
  )


def _rows(run: RecordedRun, split: str) -> pd.DataFrame:
  return run.of('train') if split == 'train' else run.evaluated(split)


def _over_steps(
  run: RecordedRun, field: str, y: str, within_passes: bool = True, **layout: object
) -> go.Figure:
  """Returns a figure of one field over the steps, with a curve for each split."""
  figure = new_figure('step', y, **layout)
  if within_passes:
    style = {'mode': 'lines', 'line': {'color': COLOURS['train'], 'width': 1}, 'opacity': 0.55}
    _line(figure, run.of('window'), field, 'within a pass', **style)
  for split in ('train', *SPLITS):
    line = {'color': COLOURS[split]}
    _line(figure, _rows(run, split), field, split, mode='lines+markers', line=line)
  return figure


def quality(metric: str, title: str) -> Callable[[RecordedRun], go.Figure | None]:
  """Returns a function that draws a metric over the steps; `title` is of the y axis."""

  def draw(run: RecordedRun) -> go.Figure | None:
    figure = _over_steps(run, metric, title, height=380)
    evaluated = run.of('eval')
    if len(evaluated):
      bound = [run.reachable(name, metric) for name in evaluated['pass']]
      bounds = evaluated.assign(bound=bound).astype({'bound': float})
      _line(figure, bounds, 'bound', 'reachable', line=DOTTED, mode='lines+markers')
    if metric in ('logloss', 'rmse', *run.cfg.ranking_metrics):
      constant = evaluated.assign(**{metric: run.constants[metric]})
      line = DOTTED | {'color': COLOURS['constant']}
      _line(figure, constant, metric, run.baseline, line=line, mode='lines+markers')
    if not figure.data:
      return None
    best = run.best
    if best is not None and pd.notna(best.get(metric)):
      star = {'symbol': 'star', 'size': 15, 'color': '#d9a514', 'line': {'width': 1}}
      style = {'mode': 'markers', 'marker': star, 'hovertemplate': '%{y:.5~g}'}
      figure.add_scatter(x=[best['step']], y=[best[metric]], name='best', **style)
    _zoomed(figure)
    ends_of_days = run.of('day_end')['step'].tolist()
    style = {'color': '#c9cdd3', 'width': 1, 'dash': 'dot'}
    line = {'type': 'line', 'yref': 'y domain', 'y0': 0, 'y1': 1, 'line': style}
    if 0 < len(ends_of_days) <= MOST_DAY_ENDS:
      figure.update_layout(shapes=[line | {'x0': step, 'x1': step} for step in ends_of_days])
      # An empty curve, whose entry in the legend says what these lines are.
      figure.add_scatter(x=[None], y=[None], name='end of a day', mode='lines', line=style)
    return figure

  draw.__name__ = metric
  return draw


def ranking(run: RecordedRun) -> go.Figure | None:
  """Draws, with model.retrieval, the metric that chooses the best epoch."""
  return quality(run.metric, run.metric)(run) if run.cfg.ranking_metrics else None


def _zoomed(figure: go.Figure) -> go.Figure:
  """Sets the range of the y axis to all values or, if there are many, to all but outliers."""
  points = [np.array([trace.x, trace.y], float) for trace in figure.data]
  steps, values = np.concatenate([np.zeros([2, 0]), *points], 1)
  values = values[np.isfinite(values) & ((steps > 0) | (steps == max(steps, default=0)))]
  if len(values):
    low, high = values.min(), values.max()
    if len(values) > MANY_VALUES:
      inner = np.quantile(values, [0.06, 0.94])
      room = 0.35 * (inner[1] - inner[0])
      low, high = max(low, inner[0] - room), min(high, inner[1] + room)
    room = 0.06 * (high - low) or 0.01 * abs(high) or 1
    figure.update_yaxes(range=[float(low - room), float(high + room)])
  return figure


def calibration(run: RecordedRun) -> go.Figure | None:
  """Draws Σ predicted / Σ clicked over the steps."""
  figure = _over_steps(run, 'calibration', 'Σ predicted / Σ clicked', within_passes=False)
  figure.add_hline(y=1, line=DOTTED)
  return _zoomed(figure)


def _curve(
  figure: go.Figure, name: str, x: Sequence[float], y: Sequence[float], hover: str, **style: object
) -> None:
  style = {'line': {'color': COLOURS.get(name)}} | style
  x, y = list(map(float, x)), list(map(float, y))
  figure.add_scatter(x=x, y=y, name=name, hovertemplate=hover, **style)


def deciles(run: RecordedRun) -> go.Figure | None:
  """Draws the click rate against the mean prediction, for each tenth of the predictions."""
  figure, shown = new_figure('mean prediction', 'click rate'), []
  for split, table in run.of_scores('deciles').items():
    weight, predicted, ctr = (np.array(table[name]) for name in ('weight', 'predicted', 'ctr'))
    # Clicks are random, so even in a calibrated model a small tenth deviates by chance.
    deviation = np.sqrt(ctr * (1 - ctr) / weight)
    bars = {'array': (2 * deviation).tolist(), 'thickness': 1, 'width': 2}
    shown += [value for value in (*predicted, *ctr) if value > 0]
    hover = 'predicted %{x:.4~g}, clicked %{y:.4~g}'
    _curve(figure, split, predicted, ctr, hover, error_y=bars, mode='lines+markers')
  if not shown:
    return None
  _diagonal(figure, min(shown), max(shown), 'calibrated')
  ticks = [digit * 10.0**power for power in range(-6, 1) for digit in (1, 2, 5)]
  axis = {'type': 'log', 'tickvals': ticks, 'ticktext': [f'{tick:g}' for tick in ticks]}
  figure.update_xaxes(**axis)
  # Bars that reach 0 would stretch a logarithmic axis without end.
  room = [float(np.log10(min(shown) / 2)), float(np.log10(max(shown) * 2))]
  return figure.update_yaxes(range=room, **axis)


def _diagonal(figure: go.Figure, low: float, high: float, name: str) -> None:
  ends = [low, high]
  style = {'mode': 'lines', 'line': DOTTED, 'hoverinfo': 'skip'}
  figure.add_scatter(x=ends, y=ends, name=name, **style)
  figure.update_layout(hovermode='closest')


def roc(run: RecordedRun) -> go.Figure | None:
  """Draws the ROC curve of each split: the true positive rate against the false positive rate."""
  figure = new_figure('share of the samples without a click', 'share of the clicks')
  for split, table in run.of_scores('ranking').items():
    if table:
      hover = '%{y:.1%} of the clicks, %{x:.1%} of the others'
      _curve(figure, split, table['others'], table['clicks'], hover)
  if not figure.data:
    return None
  _diagonal(figure, 0, 1, 'by chance')
  ends = {'range': [-0.01, 1.01]}  # lines along an axis are drawn whole
  return figure.update_layout(xaxis=ends, yaxis=ends)


def lift(run: RecordedRun) -> go.Figure | None:
  """Draws the click rate of the highest predictions over that of all samples."""
  figure = new_figure('share of the samples', 'times the click rate')
  for split, table in run.of_scores('ranking').items():
    if table:
      samples, clicks = (np.array(table[name])[1:] for name in ('samples', 'clicks'))
      hover = '%{y:.3~g} times, %{customdata:.1%} of the clicks'
      _curve(figure, split, samples, clicks / samples, hover, customdata=clicks.tolist())
  figure.add_hline(y=1, line=DOTTED)
  figure.update_xaxes(tickformat='.0%')
  return figure.update_yaxes(rangemode='tozero')


def spread(run: RecordedRun) -> go.Figure | None:
  """Draws how the predictions are distributed, for samples with a click and for all others."""
  tables = {split: table for split, table in run.of_scores('spread').items() if table}
  if not tables:
    return None
  table = tables.get('test', next(iter(tables.values())))
  edges = np.array(table['edges'])
  is_log = edges[-1] / edges[0] > 20
  figure = new_figure('prediction', 'share of the samples of its kind')
  kinds = (('others', 'without a click', SEQUENCE[7]), ('clicks', 'with a click', SEQUENCE[1]))
  for kind, name, colour in kinds:
    counts = np.array(table[kind])
    if counts.sum():
      line = {'shape': 'hv', 'width': 1, 'color': colour}
      shares, hover = [*(counts / counts.sum()), 0], '%{y:.1%} from %{x:.3~g} on'
      _curve(figure, name, edges, shares, hover, mode='lines', fill='tozeroy', line=line)
  figure.update_yaxes(rangemode='tozero', tickformat='.0%')
  return figure.update_xaxes(type='log' if is_log else 'linear')


def _table_events(run: RecordedRun) -> pd.DataFrame:
  rows = run.events[run.events['event'].isin(['window', 'train', 'day_end'])]
  return rows.assign(megabytes=rows['table_bytes'] / 1e6)


def table_bytes(run: RecordedRun) -> go.Figure | None:
  figure, rows = new_figure('step', 'MB'), _table_events(run)
  _line(figure, rows, 'megabytes', 'tables', mode='lines', line={'color': COLOURS['train']})
  for event, name in (('train', 'after a pass'), ('day_end', "after a day's end")):
    _line(figure, rows[rows['event'] == event], 'megabytes', name, mode='markers')
  figure.update_layout(hovermode='closest')
  return figure.update_yaxes(rangemode='tozero')


def features(run: RecordedRun) -> go.Figure | None:
  figure, rows = new_figure('step', 'features'), _table_events(run)
  for field in ('features', 'admitted'):
    _line(figure, rows, field, field, mode='lines+markers', marker={'size': 4})
  return figure.update_yaxes(rangemode='tozero')


def time_spent(run: RecordedRun) -> go.Figure | None:
  """Draws the seconds that each part of the work took in each pass."""
  rows = thinned(run.of('train').dropna(subset='seconds'))
  if not len(rows):
    return None
  seconds = pd.json_normalize(rows['seconds'].tolist()).fillna(0)
  figure = new_figure('', 'seconds', barmode='stack')
  epochs = rows['epoch'].map(', epoch {:.0f}'.format) if run.cfg.train.epochs > 1 else ''
  shared = os.path.commonprefix(rows['pass'].tolist())
  names = (rows['pass'] + epochs).tolist()
  labels = rows['pass'].map(lambda name: short_name(name, LABEL_WIDTH, shared)) + epochs
  for part in PARTS:
    if part in seconds and seconds[part].any():
      times = seconds[part].tolist()
      figure.add_bar(x=names, y=times, name=part, hovertemplate='%{y:.2f} s')
  every = -(-len(names) // MOST_LABELS)
  labels = labels[::every].tolist()
  return figure.update_xaxes(type='category', tickvals=names[::every], ticktext=labels)


def speed(run: RecordedRun) -> go.Figure | None:
  return _over_steps(run, 'examples_per_second', 'samples/s').update_yaxes(rangemode='tozero')


def lag(run: RecordedRun) -> go.Figure | None:
  """Draws how many messages of data.topic waited behind each pass, in the worst partitions."""
  rows = run.of('train')
  if 'lag_by_partition' not in rows:
    return None
  rows = rows.dropna(subset='lag_by_partition')
  partitions = pd.DataFrame(rows['lag_by_partition'].tolist(), rows.index)
  figure = new_figure('step', 'messages')
  for name in partitions.iloc[-1].nlargest(10).index:
    _line(figure, rows.assign(lag=partitions[name]), 'lag', f'partition {name}', mode='lines')
  return figure.update_yaxes(rangemode='tozero')


def slot_calibration(run: RecordedRun) -> go.Figure | None:
  """Draws each slot's calibration, for samples with a known feature and for all other samples."""
  slots = next(iter(run.of_scores('slots').values()), {})
  figure = bars(list(slots), 'Σ predicted / Σ clicked')
  for field, name in (('known', 'feature known'), ('unknown', 'feature unknown or blank')):
    shown = {slot: of_slot.get(f'calibration_{field}') for slot, of_slot in slots.items()}
    shown = {slot: value for slot, value in shown.items() if value is not None}
    if shown:
      style = {'mode': 'markers', 'marker': {'size': 10}}
      figure.add_scatter(x=list(shown.values()), y=list(shown), name=name, **style)
  figure.add_vline(x=1, line=DOTTED)
  values = [value for trace in figure.data for value in trace.x]
  # The axis is wide enough that small deviations do not look large.
  return figure.update_xaxes(range=[min([0.8, *values]) - 0.02, max([1.2, *values]) + 0.02])


def funnel(run: RecordedRun) -> go.Figure | None:
  """Draws how many features of each slot were seen, admitted, evicted and exported."""
  features, admitted = (run.by_slot('train', f) for f in ('features', 'admitted'))
  if not len(features):
    return None
  evicted, exported = run.by_slot('day_end', 'evicted'), run.by_slot('export', 'rows')
  gone = evicted[evicted.index < features.index[-1]].sum()
  numbers = {
    'seen': features.iloc[-1].add(gone.reindex(features.columns).fillna(0)),
    'admitted': admitted.iloc[-1],
    'evicted': evicted.sum(),
    'exported': exported.iloc[-1] if len(exported) else pd.Series(dtype=float),
  }
  figure = bars(list(features), 'features (log)', row_height=58)
  for name, values in numbers.items():
    values = values[values > 0]
    if len(values):
      figure.add_bar(x=values.tolist(), y=list(values.index), name=name, orientation='h')
  if not figure.data:
    return None
  # All bars start at one feature, so that their lengths can be compared.
  most = max(max(trace.x) for trace in figure.data)
  return figure.update_xaxes(type='log', range=[0, float(np.log10(most)) + 0.1], dtick=1)


def unknown(run: RecordedRun) -> go.Figure | None:
  """Draws, for each slot and pass evaluated, the share of samples whose feature is unknown."""
  shares = run.by_slot('eval', 'unknown')
  if not len(shares):
    return None
  rows = run.evaluated('next')
  if not len(rows):
    rows = run.events.loc[[row.name for row in run.scores.values()]]
  rows = thinned(rows[rows.index.isin(shares.index)].drop_duplicates('pass', keep='last'))
  if not len(rows):
    return None
  shares = shares.loc[rows.index]
  figure = new_figure('', '', height=110 + 30 * max(3, shares.shape[1]))
  figure.add_heatmap(
    z=(100 * shares.T).round(2).to_numpy().tolist(),
    x=rows['pass'].map(str).tolist(),
    y=list(shares),
    zmin=0,
    zmax=100,
    colorscale=[[0, '#f4f7fb'], [1, '#3568a8']],
    texttemplate='%{z:.0f}' if shares.size <= 120 else None,
    hovertemplate='%{y}, %{x}: %{z:.2f} %<extra></extra>',
    showscale=shares.size > 120,
    colorbar={'title': '%', 'thickness': 10, 'outlinewidth': 0},
  )
  figure.update_layout(hovermode='closest')
  figure.update_xaxes(type='category')
  return figure.update_yaxes(autorange='reversed', type='category', ticksuffix='  ')


def drift(run: RecordedRun) -> go.Figure | None:
  """Draws the bins of the slot that has drifted most, on the first and the last day."""
  last = run.of('drift')['slots'].tail(1) if len(run.of('drift')) else ()
  for slots in filter(None, last):
    slot = max(slots, key=lambda name: slots[name]['psi'])
    figure = new_figure(f'bin of {slot}', 'share of samples')
    first, last = slots[slot]['first'], slots[slot]['last']
    names = [*map(str, range(len(first) - 1)), 'missing']
    shown = [of_bin for of_bin in zip(names, first, last) if any(of_bin[1:])]
    names, *shares = map(list, zip(*shown))
    for name, of_day in zip(('first', 'last'), shares):
      figure.add_bar(x=names, y=of_day, name=f'{name} day')
    return figure.update_xaxes(type='category', categoryarray=names)
  return None


def importance(run: RecordedRun) -> go.Figure | None:
  """Draws how much AUC falls, or RMSE rises, if a slot or dense column is permuted."""
  measured = run.of('importance')
  if not len(measured):
    return None
  last = measured.iloc[-1]
  columns = importances(last)
  metric = 'rmse' if any('rmse' in values for values in columns.values()) else 'auc'
  losses = pd.Series({name: values[metric] for name, values in columns.items()}, dtype=float)
  losses = losses.dropna().sort_values(ascending=False)
  if not len(losses):
    return None
  half = np.array([columns[name].get(f'{metric}_plus_minus') or 0 for name in losses.index])
  colours = [COLOURS['train' if is_clear else 'unclear'] for is_clear in abs(losses) > half]
  title = 'RMSE gained' if metric == 'rmse' else 'AUC lost'
  if pd.notna(last.get('split')):
    title += f' on {last["examples"]:,.0f} samples of data.{last["split"]}'
  figure = bars(list(losses.index), title)
  figure.add_bar(
    x=losses.tolist(),
    y=list(losses.index),
    name='the model',
    orientation='h',
    marker={'color': colours},
    error_x={'array': half.tolist(), 'thickness': 1, 'width': 3, 'color': '#2b2f36'},
  )
  true = run.truth.get('importance', {})
  shown = [slot for slot in losses.index if slot in true]
  if shown:
    style = {'marker': {'color': '#2b2f36', 'symbol': 'line-ns-open', 'size': 14}}
    true_losses = [true[slot]['auc'] for slot in shown]
    figure.add_scatter(
      x=true_losses, y=shown, name='the true probabilities', mode='markers', **style
    )
  return figure


def compared(runs: Sequence[RecordedRun], metric: str, title: str, split: str) -> go.Figure | None:
  """Draws a metric of one split over the steps, a curve for each run."""
  figure = new_figure('step', title, height=380)
  for run in runs:
    _line(figure, _rows(run, split), metric, run.name, mode='lines+markers')
  # If no run has more than one value, the table of metrics shows them all.
  return _zoomed(figure) if any(len(trace.x) > 1 for trace in figure.data) else None

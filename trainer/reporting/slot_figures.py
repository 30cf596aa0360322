"""The figures of a report about slots and columns, drawn by Plotly.

Functions that draw return None if the run has no data for the figure yet.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from trainer.reporting.plots import COLOURS, DOTTED, bars, new_figure, thinned
from trainer.reporting.runs import RecordedRun


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
  if not figure.data:
    return None
  figure.add_vline(x=1, line=DOTTED)
  values = [value for trace in figure.data for value in trace.x]
  # The axis is wide enough that small deviations do not look large.
  return figure.update_xaxes(range=[min(0.8, *values) - 0.02, max(1.2, *values) + 0.02])


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
  """Draws the share of samples with unknown features, by slot and pass, as `next` or as kept."""
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
  for slots in last:
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
  dense = last.get('dense')
  columns = last['slots'] | (dense if isinstance(dense, dict) else {})
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

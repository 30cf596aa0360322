"""The style of the figures in a report."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

MOST_POINTS = 366  # of a curve, so that the page stays small
COLOURS = {
  'train': '#3568a8',
  'next': '#e07b39',
  'valid': '#3a9a6b',
  'test': '#8e5bb5',
  'reachable': '#7a7f87',
  'unclear': '#c9cdd3',
  'constant': '#c0504d',
}
SEQUENCE = ['#3568a8', '#e07b39', '#3a9a6b', '#8e5bb5', '#c0504d', '#2a9db0', '#a5892b', '#7a7f87']
DOTTED = {'color': COLOURS['reachable'], 'dash': 'dot', 'width': 1}

_GRID = {'gridcolor': '#eceef1', 'zerolinecolor': '#eceef1', 'zerolinewidth': 2}
_AXIS = {'automargin': True, 'title': {'standoff': 15}, **_GRID}
# Small, because Plotly copies and checks the template of each figure.
_TEMPLATE = {
  'data': {
    'scatter': [{'cliponaxis': False}],  # a point on an axis is drawn whole
    'bar': [{'marker': {'line': {'color': 'white', 'width': 0.5}}}],
  },
  'layout': {
    'plot_bgcolor': 'white',
    'colorway': SEQUENCE,
    'font': {'family': 'system-ui, sans-serif', 'size': 12, 'color': '#2b2f36'},
    'margin': {'l': 8, 'r': 12, 't': 8, 'b': 8},
    'hovermode': 'x unified',
    'hoverlabel': {'align': 'left'},
    'legend': {
      'orientation': 'h',
      'y': 1.02,
      'yanchor': 'bottom',
      'x': 0,
      'itemsizing': 'constant',
      'traceorder': 'normal',
    },
    'xaxis': _AXIS,
    'yaxis': _AXIS,
  },
}


def new_figure(x: str, y: str, height: int = 320, **layout: object) -> go.Figure:
  """Returns an empty figure whose axes have the titles `x` and `y`."""
  axes = {'xaxis': {'title': {'text': x}}, 'yaxis': {'title': {'text': y}}}
  return go.Figure(layout={'template': _TEMPLATE, 'height': height, **axes, **layout})


def thinned(rows: pd.DataFrame) -> pd.DataFrame:
  """Returns at most MOST_POINTS of the rows, evenly spaced, with the first and the last."""
  return rows.iloc[np.linspace(0, len(rows) - 1, min(len(rows), MOST_POINTS)).astype(int)]


def bars(slots: Sequence[str], x: str, **layout: object) -> go.Figure:
  """Returns an empty figure for horizontal bars, a row for each slot; `x` is the x axis' title."""
  height = 110 + max(3, len(slots)) * layout.pop('row_height', 34)
  figure = new_figure(x, '', height=height, **layout)
  figure.update_layout(hovermode='y unified', barmode='group', bargap=0.25)
  axis = {'autorange': 'reversed', 'type': 'category', 'categoryarray': list(slots)}
  return figure.update_yaxes(showgrid=False, ticksuffix='  ', **axis)

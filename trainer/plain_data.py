"""Types of plain data: what JSON and YAML hold, and what messages between processes hold."""

import numpy as np

Json = None | bool | int | float | str | list['Json'] | dict[str, 'Json']
JsonObject = dict[str, Json]
# What trainer.comm.messages carries; tuples arrive as lists.
Plain = Json | np.ndarray | list['Plain'] | tuple['Plain', ...] | dict[str, 'Plain']

"""Reads and writes the bodies of TensorFlow Serving's REST API.

    {"instances": [{"user": "u1", "item": 5}, …]}          -> {"predictions": [0.1, …], …}
    {"inputs": {"user": ["u1"], "item": [5, 6]}}           -> {"outputs": [0.1, …], …}
    {"context": {"user": "u1"}, "instances": [{"item": 5}, …]}
    {"instances": [{"user": "u1"}], "k": 2, "seen": [["5"]]}
                             -> {"predictions": [{"items": ["7", "6"], "scores": [0.9, 0.2]}], …}

In the first form, each object is a sample; a name that it lacks is a missing value. In the second,
each list is a column; one value stands for all samples: one user, many items. The "context" of the
third has what all its instances share. The fourth asks for the best "k" items for each query,
except those in "seen". A value {"b64": "…"} is a string in base 64. Answers also hold the
"model_version".
"""

import base64
import itertools
import json
import operator
from collections.abc import Mapping, Sequence

import numpy as np

from trainer.data.jsonl_format import Twice, parse_json, value_at
from trainer.data.request_columns import Shared
from trainer.plain_data import Json, JsonObject
from trainer.serving.limits import BadRequest
from trainer.serving.requests import (
  SAMPLE_BYTES,
  Request,
  Signature,
  check_columns,
  check_cost,
  weight,
)

SIGNATURE = 'serving_default'


_MOST_LISTS = 2  # nested: a column of lists of features
_MOST_LENGTHS, _MOST_NAMES = 4, 3  # in a message about columns of different lengths
_PLAIN = {str, int, float, bool, type(None)}


def decoded(value: Json, lists: int = 0) -> Json:
  """Returns a value with each {"b64": …} decoded; `lists` is how many lists it lies in."""
  if isinstance(value, list):
    if _PLAIN.issuperset(map(type, value)):
      return value
    if lists == _MOST_LISTS:
      raise BadRequest(f'found lists nested more than {_MOST_LISTS} deep')
    return [decoded(v, lists + 1) for v in value]
  if isinstance(value, dict) and value.keys() == {'b64'} and isinstance(value['b64'], str):
    try:
      return base64.b64decode(value['b64'], validate=True).decode()
    except ValueError:
      raise BadRequest('b64: found a value that is not UTF-8 text in base 64') from None
  return value


def parse(body: bytes, max_instances: int) -> Request:
  """Parses the body of a request for scores; TooLarge above `max_instances` samples."""
  return request_of(tree_of(body), max_instances)


def tree_of(body: bytes) -> JsonObject:
  """Returns the JSON object in the body of a request."""
  try:
    tree = parse_json(body)
  except ValueError as e:
    raise BadRequest(f'the body is not JSON: {" ".join(str(e).split())[:200]}') from None
  if not isinstance(tree, dict):
    raise BadRequest(f'the body: found a JSON {type(tree).__name__}; wanted an object')
  if twice := next((value for value in tree.values() if isinstance(value, Twice)), None):
    raise BadRequest(f'the body: found {twice!r}; wanted it once')
  return tree


def request_of(tree: JsonObject, max_instances: int) -> Request:
  """Returns the request in a body that is parsed already; raises the same errors as `parse`."""
  signature = tree.get('signature_name', SIGNATURE)
  if signature not in (SIGNATURE, ''):
    raise BadRequest(f"signature_name: found {str(signature)[:80]!r}; wanted '{SIGNATURE}'")
  if ('instances' in tree) == ('inputs' in tree):
    raise BadRequest("the body: wanted either 'instances' or 'inputs'")
  by_row = 'instances' in tree
  if by_row:
    columns, size, shared = _rows(tree['instances'], max_instances)
    context = tree.get('context', {})
    if not isinstance(context, dict):
      raise BadRequest('\'context\': wanted an object, as in {"user": "u1"}')
    if both := columns.keys() & context.keys():
      raise BadRequest(f"'{min(both)[:80]}': found in the context and in instances; wanted one")
    check_columns([*columns, *context])
    shared += sum(map(weight, context.values()))
    check_cost(size, shared, max_instances)
    columns |= {name: Shared([decoded(value, 1)]) for name, value in context.items()}
  elif 'context' in tree:
    raise BadRequest("'context': found with 'inputs'; wanted a column of one value in these")
  else:
    columns, size, shared = _columns(tree['inputs'], max_instances)
  columns = {name: _once(values) for name, values in columns.items()}
  return Request(columns, size, by_row, max(size, size * shared // SAMPLE_BYTES))


def _once(values: list[Json]) -> list[Json]:
  """Returns a column whose values are all equal as a Shared one, any other as it is."""
  if len(values) < 2 or type(values[0]) not in _PLAIN or values.count(values[0]) < len(values):
    return values
  # 1, 1.0 and true are equal, and so are 0.0 and −0.0.
  return values if values[0] == 0 or len(set(map(type, values))) > 1 else Shared(values[:1])


def _rows(instances: Json, max_instances: int) -> tuple[dict[str, list[Json]], int, int]:
  """Returns the columns of a list of objects, the number of samples, and the bytes they share."""
  if not isinstance(instances, list) or not instances:
    raise BadRequest("'instances': wanted a list of objects, at least one")
  check_cost(len(instances), 0, max_instances)
  for i, instance in enumerate(instances):
    if not isinstance(instance, dict):
      raise BadRequest(f'instances[{i}]: wanted an object, as in {{"user": "u1", "item": 5}}')
  names, at, shared = instances[0].keys(), operator.getitem, 0
  if any(instance.keys() != names for instance in instances):
    # As in JSON lines, a name that a sample lacks is a path into its objects, or a missing value.
    names, at = dict.fromkeys(itertools.chain.from_iterable(instances)), value_at
    shared = sum(map(weight, names))  # each name is looked up in each sample
    check_cost(len(instances), shared, max_instances)
  check_columns(names)
  columns = {name: decoded([at(one, name) for one in instances]) for name in names}
  return columns, len(instances), shared


def _columns(inputs: Json, max_instances: int) -> tuple[dict[str, list[Json]], int, int]:
  """Returns an object of columns, the number of samples, and the bytes they share."""
  if not isinstance(inputs, dict) or not inputs:
    raise BadRequest('\'inputs\': wanted an object of columns, as in {"user": ["u1"]}')
  check_columns(inputs)
  columns = {}
  for name, values in inputs.items():
    value = decoded(values)
    columns[name] = value if isinstance(value, list) else [value]
  lengths = {name: len(values) for name, values in columns.items()}
  sizes = {length for length in lengths.values() if length != 1}
  if len(sizes) > 1:
    by_length = [[name for name in lengths if lengths[name] == size] for size in sorted(sizes)]
    found = [
      f'{_listed(names)} with {lengths[names[0]]:,} value{"s" * (lengths[names[0]] != 1)}'
      for names in sorted(by_length, key=len)[:_MOST_LENGTHS]
    ]
    raise BadRequest(f'inputs: found {" and ".join(found)}; wanted one length, or 1')
  if not sizes:
    return columns, 1, 0
  (size,) = sizes
  columns = {name: c if len(c) == size else Shared(c) for name, c in columns.items()}
  shared = sum(weight(values[0]) for values in columns.values() if isinstance(values, Shared))
  check_cost(size, shared, max_instances)
  return columns, size, shared


def _listed(columns: Sequence[str]) -> str:
  """Returns the names of a few columns, or the number of many."""
  if len(columns) > _MOST_NAMES:
    return f'{len(columns)} columns'
  return ', '.join(f"'{name[:80]}'" for name in columns)


def answer(request: Request, outputs: Mapping[str, np.ndarray], version: int) -> bytes:
  """Returns the body of the answer with {name: float32 [B]}, without the name of a single one."""
  # Nine digits determine a float32.
  texts = {name: list(map('{:.9g}'.format, values.tolist())) for name, values in outputs.items()}
  if len(texts) == 1:
    (values,) = texts.values()
    scores = f'[{",".join(values)}]'
  elif request.by_row:
    names = [json.dumps(name) for name in texts]
    rows = (','.join(map('{}:{}'.format, names, row)) for row in zip(*texts.values()))
    scores = f'[{",".join(map("{{{}}}".format, rows))}]'
  else:
    columns = (f'{json.dumps(name)}:[{",".join(values)}]' for name, values in texts.items())
    scores = f'{{{",".join(columns)}}}'
  kind = 'predictions' if request.by_row else 'outputs'
  return f'{{"{kind}":{scores},"model_version":"{version}"}}'.encode()


def error(text: str) -> bytes:
  """Returns the body of an answer that refuses a request."""
  return json.dumps({'error': text}, ensure_ascii=False).encode(errors='replace')


def status(version: int) -> bytes:
  """Returns the body that says which version is served."""
  ok = {'error_code': 'OK', 'error_message': ''}
  state = {'version': str(version), 'state': 'AVAILABLE', 'status': ok}
  return json.dumps({'model_version_status': [state]}).encode()


def metadata(name: str, predict: Signature | None, recommend: Signature | None) -> bytes:
  """Returns the body that describes a model, with examples of requests.

  `predict` and `recommend` are the signatures of requests for scores and items, None if refused.
  """

  def tensor(column: str, dtype: str, *shape: str) -> dict[str, Json]:
    dims = [{'size': size, 'name': ''} for size in ('-1', *shape)]
    return {'dtype': dtype, 'tensor_shape': {'dim': dims, 'unknown_rank': False}, 'name': column}

  def definition(signature: Signature, method: str, *outputs: dict[str, Json]) -> dict[str, Json]:
    inputs = {
      column: tensor(column, dtype) | {'may_be_null': True}
      for column, dtype in signature.columns.items()
    }
    outputs = {output['name']: output for output in outputs}
    return {'inputs': inputs, 'outputs': outputs, 'method_name': method}

  definitions: dict[str, Json] = {}
  examples: dict[str, Json] = {}
  if predict is not None:
    outputs = (tensor(output, 'DT_FLOAT') for output in predict.outputs)
    definitions[SIGNATURE] = definition(predict, 'tensorflow/serving/predict', *outputs)
    examples['example_request'] = {'instances': [predict.example]}
  if recommend is not None:
    outputs = tensor('items', 'DT_STRING', '-1'), tensor('scores', 'DT_FLOAT', '-1')
    definitions['recommend'] = definition(recommend, 'recommend', *outputs)
    example = {'instances': [recommend.example], 'k': 1, 'seen': [['1']]}
    examples['example_recommend_request'] = example
  version = (predict or recommend).version
  tree = {
    'model_spec': {'name': name, 'signature_name': '', 'version': str(version)},
    'metadata': {'signature_def': {'signature_def': definitions}},
    **examples,
  }
  return json.dumps(tree, ensure_ascii=False).encode()


METHODS = ('predict', 'recommend')


def index(name: str, methods: Sequence[str]) -> bytes:
  """Returns the body that lists the server's paths; `methods` are predict, recommend or both."""
  model = f'/v1/models/{name}'
  paths = {method: f'POST {model}:{method}' for method in methods} | {
    'metadata': f'GET {model}/metadata',
    'status': f'GET {model}',
    'metrics': 'GET /metrics',
    'health': 'GET /healthz',
  }
  return json.dumps(paths).encode()

"""What a server counts, for Prometheus."""

import time
import types
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trainer.serving.versioned_store import Version

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # seconds


class Figures:
  """The figures of one process, which serves `version()`."""

  def __init__(self, version: Callable[[], Version | None]):
    registry = self._registry = CollectorRegistry()
    self.requests = Counter('ctr_requests', 'Requests by status.', ['status'], registry=registry)
    what = 'From the whole request to its answer.'
    self.latency = Histogram('ctr_request_seconds', what, registry=registry, buckets=_BUCKETS)
    self._samples = Counter('ctr_samples', 'Samples scored.', registry=registry)
    what = 'Distinct features without a row, of the requests that were scored together.'
    self._unknown = Counter('ctr_unknown_features', what, ['slot'], registry=registry)
    what = 'Columns of requests that the model does not read.'
    self._ignored = Counter('ctr_ignored_columns', what, registry=registry)
    number = Gauge('ctr_version', 'The version served.', registry=registry)
    number.set_function(lambda: getattr(version(), 'sequence', 0))
    what = 'Requests that are scored or wait for that.'
    self.under_way = Gauge('ctr_requests_under_way', what, registry=registry)
    what = 'Since the newest export that is served was written.'
    age = Gauge('ctr_version_age_seconds', what, registry=registry)
    age.set_function(lambda: time.time() - getattr(version(), 'done_at', float('nan')))

  def scored(self, samples: int, ignored: int, unknown: Mapping[str, int]) -> None:
    """Counts samples, columns that were ignored, and by slot the features without a row."""
    self._samples.inc(samples)
    self._ignored.inc(ignored)
    for slot, count in unknown.items():
      self._unknown.labels(slot).inc(count)

  def text(self) -> bytes:
    """Returns the figures as /metrics has them."""
    return generate_latest(self._registry)


def summed(texts: Sequence[str]) -> bytes:
  """Returns the figures of several processes as those of one: sums, or the oldest version."""
  families = {}
  for text in texts:
    for family in text_string_to_metric_families(text):
      samples = families.setdefault(family.name, (family, {}))[1]
      for sample in family.samples:
        key = sample.name, *sample.labels.items()
        values = [sample.value, *([samples[key].value] if key in samples else [])]
        if family.name == 'ctr_version' or sample.name.endswith('_created'):
          value = min(values)
        else:
          value = max(values) if family.name == 'ctr_version_age_seconds' else sum(values)
        samples[key] = sample._replace(value=value)
  for family, samples in families.values():
    family.samples = list(samples.values())
  return generate_latest(types.SimpleNamespace(collect=lambda: [f for f, _ in families.values()]))

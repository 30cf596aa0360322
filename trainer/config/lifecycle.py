"""The section `lifecycle`: which modes its thresholds are of."""

# What a threshold switches on where the mode is not given.
LIFECYCLE_MODES = {
  'admission': {
    'admission_threshold': 'score',
    'admission_count': 'count',
    'admission_probability': 'probability',
  },
  'eviction': {
    'delete_threshold': 'score',
    'min_age_days': 'score',
    'delete_after_unseen_days': 'unseen',
  },
}

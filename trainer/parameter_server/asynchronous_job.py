"""A job whose workers step independently: modes ps_async and ps_geo."""

from collections.abc import Callable

from trainer.data.prepared import PreparedPass
from trainer.errors import BadPass
from trainer.job.job import Job
from trainer.training.loop import wants_checkpoint
from trainer.training.step import StepFlags

_NO_FLAGS = StepFlags(False, False, False)


class AsynchronousJob(Job):
  """A job whose workers claim units of a pass, and do not wait for one another within the pass.

  The next unit goes to the worker that asks next, so a slow worker delays nobody. A lost worker's
  units go to others. All workers meet before and after a pass, and for checkpoints. If one finds
  that the pass ruins the state, all give up the pass.

  In ps_async, a unit is a whole global batch, and each push is one step of the servers' model. In
  ps_geo, a unit is one worker's slice of a global batch; each worker trains a copy of the model,
  and the copies are averaged.
  """

  def open_run(self) -> None:
    self._reported = self.communicator.rank == 0 and not self.communicator.late
    if not self.communicator.late:
      super().open_run()
      return
    state = self.communicator.enter()
    self.lock.id, self._saves_each_pass = state['lock'], state['saves_each_pass']
    self.state.take_over(state['state'])
    self.step.set_rates(self.progress.rate, self.progress.first_step)
    self.step.load_local_state(state['local'])

  def _converting_processes(self) -> int:
    return 1  # only the first worker converts, because the number of workers changes

  def train_on(self, prepared: PreparedPass, on_step: Callable[[], None]) -> bool:
    cfg, progress = self.cfg, self.progress
    slices = len(self.step.cluster.workers) if cfg.sync.mode == 'ps_geo' else 1
    total = prepared.num_batches(cfg.train.batch_size) * slices
    slice_of = prepared.slices(
      cfg.train.batch_size, slices, cfg.seed, progress.epoch, cfg.data.shuffle
    )
    while True:
      # What a worker that enters during the pass receives.
      state = {
        'state': self.state.handed_over(),
        'saves_each_pass': self._saves_each_pass,
        'local': self.step.local_state(),
        'lock': self.lock.id,
      }
      work = {'slices': slices, 'first': progress.batch * slices, 'total': total}
      self.communicator.open_pass(work | {'pause_after': cfg.checkpoint.every_steps}, state)
      try:
        while True:
          save = wants_checkpoint(cfg.checkpoint.every_seconds, self.state)
          stop, is_merged = bool(self.stop_request), self.step.is_merged
          unit, reason, batches = self.communicator.claim(stop, save, is_merged)
          if reason == 'merge':
            self.step.merge()
            continue
          if unit is None:
            break
          staged = self.step.stage(slice_of(*divmod(unit, slices)))
          self.step.train(staged, self.step.route(staged), None, _NO_FLAGS)
          progress.batch = unit // slices
          on_step()
        self.step.finish_pass()
      except BadPass as e:
        self.communicator.give_up(str(e))
      why = self.communicator.close_pass()
      self._let_first_report()
      if why:
        raise BadPass(why)
      progress.batch = batches
      if reason != 'save':
        return reason == 'end'
      self.step.consolidate()
      self.save()

  def _let_first_report(self) -> None:
    """Makes the first present worker report, and own the run_dir; all fail if it cannot."""
    is_first = self.communicator.rank == 0
    begins, ends = is_first and not self._reported, self._reported and not is_first
    if ends:
      self.lock.leave()
    self.communicator.together(
      f'cannot use run_dir {self.cfg.run_dir}',
      lambda: self.lock.follow(self.lock.id) if begins else None,
    )
    if begins or ends:
      self._reported = is_first
      self.log.open(is_first)

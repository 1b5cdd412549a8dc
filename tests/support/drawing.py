"""A scheduler with the loop and the prompts of one caller."""

from bass_cli.run import scheduler
from bass_cli.run.requests import Request
from bass_cli.run.tasks import EndRule, TaskBuilder


class Scheduler(scheduler.Scheduler):
    """Draws on `loop`. count: of the prompts; None if unknown. For the others see TaskBuilder,
    EndRule and scheduler.Scheduler."""

    def __init__(
        self,
        job,
        tokenizer,
        loop,
        *,
        context,
        eos_ids,
        stop_ids=(),
        tags=None,
        count=None,
        on_round=None,
    ):
        builder = TaskBuilder(job, tokenizer, context=context, tags=tags)
        rule = EndRule(eos_ids, job.sampling.stop, stop_ids)
        super().__init__(builder, rule, on_round=on_round)
        self._count = count
        self.resume(loop)

    def run(self, prompts, done, *, redraws=False):
        """Yield every sample that is not in `done`. For the arguments see Request.

        After `stop` and `resume`, a second call with the same prompts continues.
        """
        admitted = (one for one in self._requests if one.prompts is prompts)
        request = next(admitted, None)
        if request is None:
            request = Request(self._job, prompts, done, redraws=redraws, count=self._count)
            self.add(request)
        try:
            yield from self.results(request, self.step)
        except GeneratorExit:
            self.cancel(request)
            raise

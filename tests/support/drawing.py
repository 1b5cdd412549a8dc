"""A Conductor with the loop and the prompts of one caller."""

from bass_cli.run import scheduler
from bass_cli.run.requests import Request


class Conductor(scheduler.Conductor):
    """Draws on `loop`. count: of the prompts; None if unknown. The rest: see scheduler.Conductor."""

    def __init__(self, job, tokenizer, loop, *, count=None, **more):
        super().__init__(job, tokenizer, **more)
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

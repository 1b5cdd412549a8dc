"""Draw samples with the library, and print each when it is finished.

python examples/library.py [PAIR]
"""

import sys

from bass_cli import Job, Sampling, generate


def main(pair: str = "smollm2") -> None:
    prompts: list[str | dict[str, str]] = [
        "The capital of France is",
        {"id": "code", "prompt": "def add(a, b):", "source": "mine"},
    ]
    sampling = Sampling(seed=7, max_new_tokens=16, stop=["\n\n"])
    job = Job(pair=pair, n=2, device="cpu", sampling=sampling)
    for sample in generate(prompts, job):
        print(
            f"{sample.id} {sample.sample}: {sample.text!r} ({sample.finish_reason}, "
            f"{sample.accepted} drafts accepted)"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`bass distill`: its options and its output. Heavy imports happen only when the command runs.

The work itself is in distill/command.py.
"""

from __future__ import annotations

from bass_cli.cli.exit_codes import exit_codes
from bass_cli.cli.flags import DRAFTING, MACHINE, MODELS, OUTPUT, SAMPLING, Flag
from bass_cli.cli.options import OPTIONS, in_flags, takes
from bass_cli.config.args import DistillArgs
from bass_cli.io import terminal
from bass_cli.io.console import Screen

_DATA, _TRAINING = "The target's samples", "Training"
_FLAGS = {
    "draft": OPTIONS["draft"]._replace(
        text="The pair's draft; if it is a model, the new draft starts from it (without --from "
        "and --layers)"
    ),
    "source": Flag(
        "Start the draft from this small model of the target's family (like --model)",
        MODELS,
        "MODEL",
        "the pair's draft",
        flag="--from",
    ),
    "layers": Flag(
        "Start the draft from the target's first N layers",
        MODELS,
        "N",
        "a quarter of them, if there is no draft model",
    ),
    "prompts": Flag(
        "Prompts for the samples (as bass generate reads them)",
        _DATA,
        "FILE",
        "none: bass generates its own prompts, half chats, half free text",
    ),
    "chat": Flag(
        "With --prompts: apply the model's chat template; without: only chats, or only free text",
        _DATA,
        default="both; with --prompts: for prompts with messages",
        flag="--chat/--no-chat",
    ),
    "prompt_column": OPTIONS["prompt_column"]._replace(group=_DATA),
    "limit": OPTIONS["limit"]._replace(group=_DATA),
    "tokens": Flag(
        "Draw about N tokens of samples; the prompts of a file are repeated as needed",
        _DATA,
        "N",
        "two passes over them are --steps; at most 50000 (GPU: 10000000)",
    ),
    "n": OPTIONS["n"]._replace(
        text="Samples of each prompt; with --prompts and no --tokens, each is used once",
        group=_DATA,
        default="4; fewer if --tokens is small",
    ),
    "max_new_tokens": OPTIONS["max_new_tokens"]._replace(
        group=_DATA, default="384, or a quarter of --tokens if less"
    ),
    "temperature": OPTIONS["temperature"]._replace(
        text="Temperature of the samples", group=_DATA, default="0.9"
    ),
    "seed": OPTIONS["seed"]._replace(text="Random seed of samples and training", group=SAMPLING),
    "batch_size": OPTIONS["batch_size"]._replace(text="Samples decoded at once", group=MACHINE),
    "draft_length": Flag("Train for drafts of up to N tokens, 2 to 32", DRAFTING, "N", "8"),
    "minutes": Flag(
        "Stop training after this many minutes (sampling comes before)",
        _TRAINING,
        "NUMBER",
        "no limit",
    ),
    "steps": Flag(
        "Number of training steps", _TRAINING, "N", "two passes over the samples, or --minutes"
    ),
    "learning_rate": Flag(
        "Peak learning rate (linear warm-up, cosine decay)", _TRAINING, "NUMBER", "0.0001"
    ),
    "windows": Flag(
        "Windows of text in a training step", _TRAINING, "N", "16", flag="--train-batch"
    ),
    "window_tokens": Flag("Tokens in a window, a multiple of 8", _TRAINING, "N", "512"),
    "ray": OPTIONS["ray"]._replace(
        text="Draw and train with Ray actors, one for each GPU: on this machine (local), or on the "
        "cluster it belongs to (auto, or HOST:PORT), with --out in a folder that all nodes "
        "share; needs bass-cli[ray]"
    ),
    "actors": OPTIONS["actors"],
    "dtype": OPTIONS["dtype"]._replace(takes="auto|bf16|fp32"),
    "out": Flag(
        "Folder for samples, checkpoint, draft, pair file and report; the same command resumes an "
        "interrupted run there",
        OUTPUT,
        "DIR",
    ),
    "overwrite": Flag("Start again in a folder that bass distill made", OUTPUT),
}


@takes(DistillArgs, _FLAGS)
def distill(args: DistillArgs) -> None:
    """Train a draft that proposes several tokens in one pass (parallel:MODEL), on the target's own
    samples.

    \b
    Examples:
      bass distill --pair mine.yaml --out drafts --minutes 10
      bass distill --model big.gguf --from small.gguf --out drafts
      bass distill --pair mine.yaml --out drafts --ray local --actors 8

    The folder gets a pair file for bass generate --pair. After an interruption, the same command
    resumes the run.
    """
    screen = Screen(args.quiet, document=args.json_document, render=in_flags)
    with exit_codes(screen, "interrupted; the same command resumes from here"):
        if not args.out:
            from bass_cli.errors import UserError

            raise UserError("--out (or BASS_OUT): name a folder for the samples and the draft")
        from bass_cli.distill.command import run

        document = run(args, screen)
        if args.json_document:
            terminal.line(document, stdout=True)
